//! The best possible cache: with the whole future known, evict what is needed last. Owns a recording of requests.
//! Never an online policy. Surprising fact: with the experts of the running token pinned, evicting the farthest of the
//! others is still optimal, because a whole token is one request as soon as its experts fit the cache together.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;

use crate::curve::MissCurve;
use crate::directory::{ClassShape, RouteError};
use crate::ids::{ExpertIdx, ExpertKey, LayerIdx};
use crate::sim::{Tally, wave_len};

/// Marks in the top bits of a recorded use; the rest is the dense number of the expert.
const STARTS_REQUEST: u32 = 1 << 31;
const STARTS_TOKEN: u32 = 1 << 30;
const NUMBER: u32 = STARTS_TOKEN - 1;
const NEVER: u32 = u32::MAX;

/// Requests in memory: 4 bytes a use, 8 while the optimum is computed, 8 more in its heap at worst.
pub struct Recording {
    /// By layer index: dense number of expert 0 and the number of experts.
    layers: Vec<Option<(u32, u16)>>,
    /// Dense number of expert 0 of every layer that has experts, rising.
    bases: Vec<(u32, LayerIdx)>,
    experts_total: u32,
    uses: Vec<u32>,
    last_layer: Option<LayerIdx>,
    /// A token began with a request that named nobody: the next one carries its mark.
    token_begins: bool,
    requests: u64,
}

impl Recording {
    /// Uses that fit one recording.
    pub const USES_MAX: usize = NEVER as usize - 1;

    /// An empty recording of a model with these routed layers and their numbers of experts.
    pub fn new(layers: &[(LayerIdx, u16)]) -> Self {
        let (mut table, mut bases, mut total) = (Vec::new(), Vec::new(), 0u32);
        for &(layer, experts) in layers {
            let at = usize::from(layer.0);
            if table.len() <= at {
                table.resize(at + 1, None);
            }
            assert!(table[at].is_none(), "layer {at} is named twice");
            table[at] = Some((total, experts));
            if experts > 0 {
                bases.push((total, layer));
            }
            total += u32::from(experts);
        }
        Self {
            layers: table,
            bases,
            experts_total: total,
            uses: Vec::new(),
            last_layer: None,
            token_begins: false,
            requests: 0,
        }
    }

    /// Requests recorded.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// Uses recorded.
    pub fn uses(&self) -> usize {
        self.uses.len()
    }

    /// Records one request. A layer not above the last one starts the next token, as in `Directory`.
    ///
    /// # Errors
    /// `UnknownLayer` or `UnknownExpert`; nothing is recorded.
    pub fn push(&mut self, layer: LayerIdx, ids: &[ExpertIdx]) -> Result<(), RouteError> {
        let found = self.layers.get(usize::from(layer.0)).copied().flatten();
        let (base, experts) = found.ok_or(RouteError::UnknownLayer { layer })?;
        if let Some(&expert) = ids.iter().find(|e| e.0 >= experts) {
            return Err(RouteError::UnknownExpert { key: ExpertKey { layer, expert }, experts });
        }
        assert!(self.uses.len() + ids.len() <= Self::USES_MAX, "a recording holds 2^32 uses at most");
        let mut marks = STARTS_REQUEST;
        self.token_begins |= self.last_layer.is_none_or(|last| layer <= last);
        if self.token_begins && !ids.is_empty() {
            self.token_begins = false;
            marks |= STARTS_TOKEN;
        }
        for expert in ids {
            self.uses.push((base + u32::from(expert.0)) | core::mem::take(&mut marks));
        }
        self.last_layer = Some(layer);
        self.requests += u64::from(!ids.is_empty());
        Ok(())
    }

    /// The miss curve of each class. Experts keep their numbers over all classes, so curves are as long as the model has experts.
    pub fn miss_curves(&self, shapes: &[ClassShape]) -> Vec<MissCurve> {
        let total = self.experts_total as usize;
        let mut class_of = alloc::vec![0u32; total];
        for (class, shape) in shapes.iter().enumerate() {
            for &(layer, _) in &shape.layers {
                let found = self.layers.get(usize::from(layer.0)).copied().flatten();
                let (base, count) = found.unwrap_or((0, 0));
                class_of[base as usize..base as usize + usize::from(count)].fill(class as u32);
            }
        }
        let mut curves: Vec<MissCurve> = shapes.iter().map(|_| MissCurve::new(total)).collect();
        for entry in &self.uses {
            let number = (entry & NUMBER) as usize;
            curves[class_of[number] as usize].record(number);
        }
        curves
    }

    /// The fewest misses that any cache of these classes can have on the recording, starting empty; the first
    /// `skip_requests` are served but not counted.
    pub fn optimum(&self, shapes: &[ClassShape], skip_requests: u64) -> Tally {
        let (mut tally, mut request) = (Tally::default(), 0u64);
        self.optimum_by_request(shapes, &mut |_, served| {
            if request >= skip_requests {
                tally.add(served);
            }
            request += 1;
        });
        tally
    }

    /// As `optimum`, telling what each request found, in the order of the recording: its layer, its counts. A request that
    /// is too large for its class comes in waves (`sim::wave_len`), as a live cache would serve it.
    pub fn optimum_by_request(&self, shapes: &[ClassShape], on_request: &mut dyn FnMut(LayerIdx, &Tally)) {
        let mut state = Optimum::new(self, shapes);
        let wave_len = wave_len(shapes);
        let next = self.next_uses();
        let mut at = 0;
        while at < self.uses.len() {
            let end = at + 1 + self.uses[at + 1..].iter().take_while(|&&u| u & STARTS_REQUEST == 0).count();
            if self.uses[at] & STARTS_TOKEN != 0 {
                state.next_token();
            }
            let mut served = Tally { requests: 1, ..Tally::default() };
            for begin in (at..end).step_by(wave_len(end - at)) {
                let wave = begin..end.min(begin + wave_len(end - at));
                // The directory takes a second request of a layer for the next token.
                if begin > at {
                    state.next_token();
                }
                state.serve_wave(&self.uses[wave.clone()], &next[wave], &mut served);
            }
            served.all_hit = u64::from(served.misses == 0);
            on_request(self.layer_of(self.uses[at] & NUMBER), &served);
            at = end;
        }
    }

    /// Layer of a dense number.
    fn layer_of(&self, number: u32) -> LayerIdx {
        let after = self.bases.partition_point(|&(base, _)| base <= number);
        self.bases[after - 1].1
    }

    /// Position of the next use of the same expert, for every use.
    fn next_uses(&self) -> Vec<u32> {
        let mut next = alloc::vec![NEVER; self.uses.len()];
        let mut seen = alloc::vec![NEVER; self.experts_total as usize];
        for (i, entry) in self.uses.iter().enumerate().rev() {
            let last = &mut seen[(entry & NUMBER) as usize];
            // `push` keeps positions below `NEVER`.
            next[i] = core::mem::replace(last, i as u32);
        }
        next
    }
}

#[derive(Clone, Copy)]
struct Expert {
    class: u32,
    /// Position of its next use; current only while cached.
    next: u32,
    is_cached: bool,
    /// Serial of the last token that used it.
    token: u64,
    /// Serial of the last request that used it.
    request: u64,
}

struct Class {
    slots: usize,
    cached: usize,
    /// Next use and number; an entry is stale when the expert left or was used since.
    heap: BinaryHeap<(u32, u32)>,
    /// Entries of the running token, back in the heap when it ends.
    parked: Vec<(u32, u32)>,
}

/// Cache contents under the optimal rule.
struct Optimum {
    experts: Vec<Expert>,
    classes: Vec<Class>,
    token: u64,
    request: u64,
}

impl Optimum {
    fn new(recording: &Recording, shapes: &[ClassShape]) -> Self {
        let absent = Expert { class: u32::MAX, next: NEVER, is_cached: false, token: 0, request: 0 };
        let mut experts = alloc::vec![absent; recording.experts_total as usize];
        for (class, shape) in shapes.iter().enumerate() {
            for &(layer, _) in &shape.layers {
                let found = recording.layers.get(usize::from(layer.0)).copied().flatten();
                let (base, count) = found.unwrap_or((0, 0));
                for expert in &mut experts[base as usize..base as usize + usize::from(count)] {
                    expert.class = class as u32;
                }
            }
        }
        let class = |s: &ClassShape| Class { slots: s.slots, cached: 0, heap: BinaryHeap::new(), parked: Vec::new() };
        Self { experts, classes: shapes.iter().map(class).collect(), token: 0, request: 0 }
    }

    fn next_token(&mut self) {
        self.token += 1;
        for class in &mut self.classes {
            class.heap.extend(class.parked.drain(..));
            // Stale entries pile up while nothing is evicted; drop them when they are most of the heap.
            if class.heap.len() > 4 * class.slots + 1024 {
                let experts = &self.experts;
                class.heap.retain(|&(next, n)| experts[n as usize].is_cached && experts[n as usize].next == next);
            }
        }
    }

    /// Marks a cached expert as used by the running token.
    fn pin(&mut self, number: u32, next: u32) {
        let expert = &mut self.experts[number as usize];
        if expert.is_cached {
            (expert.token, expert.request, expert.next) = (self.token, self.request, next);
        }
    }

    /// Serves uses that are asked for together.
    fn serve_wave(&mut self, uses: &[u32], next: &[u32], served: &mut Tally) {
        self.request += 1;
        // Hits first: what this request uses must not be its own victim.
        for (entry, &next) in uses.iter().zip(next) {
            self.pin(entry & NUMBER, next);
        }
        for (entry, &next) in uses.iter().zip(next) {
            let (is_hit, is_eviction) = self.serve(entry & NUMBER, next);
            served.hits += u64::from(is_hit);
            served.misses += u64::from(!is_hit);
            served.evictions += u64::from(is_eviction);
        }
    }

    /// Serves one use; returns whether it hit and whether it evicted.
    fn serve(&mut self, number: u32, next: u32) -> (bool, bool) {
        let expert = self.experts[number as usize];
        assert!(expert.class != u32::MAX, "a layer of the recording is in no size class");
        let is_hit = expert.is_cached;
        let mut is_eviction = false;
        if !is_hit {
            let class = expert.class as usize;
            if self.classes[class].cached == self.classes[class].slots {
                self.evict(class);
                is_eviction = true;
            }
            self.classes[class].cached += 1;
        }
        self.experts[number as usize] =
            Expert { next, is_cached: true, token: self.token, request: self.request, ..expert };
        // Used by this token: no candidate before the next one.
        self.classes[expert.class as usize].parked.push((next, number));
        (is_hit, is_eviction)
    }

    fn evict(&mut self, class: usize) {
        let (class, experts) = (&mut self.classes[class], &mut self.experts);
        class.cached -= 1;
        while let Some((next, number)) = class.heap.pop() {
            let expert = &mut experts[number as usize];
            if expert.is_cached && expert.next == next && expert.token < self.token {
                expert.is_cached = false;
                return;
            }
        }
        // Fewer slots than the token uses: the farthest of the token's own experts must go.
        let may_leave = |&(next, n): &(u32, u32)| {
            let expert = &experts[n as usize];
            expert.is_cached && expert.next == next && expert.request < self.request
        };
        let farthest = class.parked.iter().copied().filter(may_leave).max();
        let (_, number) = farthest.expect("a class has slots for one request");
        experts[number as usize].is_cached = false;
    }
}
