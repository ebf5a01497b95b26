//! Which experts are cached, and what each request evicts. Owns one policy a size class and the epoch of the steps.
//! Never holds bytes, slots or locks; a caller that keeps its own state beside it applies the placements it is told.
//! Surprising fact: nobody announces a token. A request for the same or an earlier layer starts the next epoch.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::ids::{ExpertIdx, ExpertKey, LayerIdx, Phase};
use crate::policy::{Epoch, Policy};

/// Layers whose experts have the same size share slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClassShape {
    /// Layers of the class with their number of experts.
    pub layers: Vec<(LayerIdx, u16)>,
    /// Slots of the class.
    pub slots: usize,
}

/// What a request does about one expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// The expert is cached.
    Hit,
    /// The expert takes a free slot, or the slot of the victim.
    Fill {
        /// Who left for it; `None` when a slot was free.
        evict: Option<ExpertKey>,
    },
}

/// A request that no cache of this model could serve. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RouteError {
    /// The layer routes no experts.
    #[error("layer {} has no routed experts; the route belongs to another model", layer.0)]
    UnknownLayer {
        /// Asked.
        layer: LayerIdx,
    },
    /// The expert index is past the layer's count.
    #[error("{key} does not exist: the layer has {experts} experts; the route belongs to another model")]
    UnknownExpert {
        /// Asked.
        key: ExpertKey,
        /// Experts of the layer.
        experts: u16,
    },
    /// An expert is named twice in one request.
    #[error("{key} is requested twice at once; name each expert once")]
    Duplicate {
        /// Named twice.
        key: ExpertKey,
    },
    /// More experts at once than slots.
    #[error("{asked} experts of layer {} requested at once, but their class has {slots} slots; ask for fewer at a time", layer.0)]
    TooMany {
        /// Layer asked.
        layer: LayerIdx,
        /// Experts asked.
        asked: usize,
        /// Slots of the class.
        slots: usize,
    },
}

struct Class {
    policy: Box<dyn Policy>,
    slots: usize,
}

#[derive(Clone, Copy)]
struct Layer {
    class: usize,
    experts: u16,
    /// Dense number of the layer's expert 0.
    base: usize,
}

/// What is known of one expert, cached or not: in one place, so that a use looks into memory once.
#[derive(Clone, Copy)]
struct Seat {
    /// Serial of the last request that named the expert: finds repeats, protects the request from itself.
    named: u64,
    /// Epoch up to which the expert is used or expected: a prefetch takes no such slot.
    wanted_until: Epoch,
    is_present: bool,
    /// Whether the last `favour` of its layer named it.
    is_favoured: bool,
    /// Whether decode was the last to use it.
    is_of_decode: bool,
}

impl Seat {
    const EMPTY: Seat =
        Seat { named: 0, wanted_until: Epoch(0), is_present: false, is_favoured: false, is_of_decode: false };
}

/// The set of cached experts and the rule by which it changes.
pub struct Directory {
    classes: Vec<Class>,
    /// By layer index; `None` where a layer routes nothing.
    layers: Vec<Option<Layer>>,
    /// By dense number.
    seats: Vec<Seat>,
    serial: u64,
    epoch: Epoch,
    last_layer: Option<LayerIdx>,
    /// Whether `begin_token` started the epoch and no request has come since.
    is_announced: bool,
    /// Places in the running request of experts that are not cached.
    missing: Vec<usize>,
    /// Whether `favour` was ever called.
    has_favourites: bool,
}

impl Directory {
    /// An empty directory; `policy(slots)` is called once a class. A layer must appear in one class only.
    pub fn new(shapes: &[ClassShape], policy: &dyn Fn(usize) -> Box<dyn Policy>) -> Self {
        let mut layers: Vec<Option<Layer>> = Vec::new();
        let mut experts_total = 0;
        for (class, shape) in shapes.iter().enumerate() {
            for &(layer, experts) in &shape.layers {
                let at = usize::from(layer.0);
                if layers.len() <= at {
                    layers.resize(at + 1, None);
                }
                assert!(layers[at].is_none(), "layer {at} is in two size classes");
                layers[at] = Some(Layer { class, experts, base: experts_total });
                experts_total += usize::from(experts);
            }
        }
        let classes = shapes.iter().map(|s| Class { policy: policy(s.slots), slots: s.slots }).collect();
        Self {
            classes,
            layers,
            seats: alloc::vec![Seat::EMPTY; experts_total],
            serial: 0,
            epoch: Epoch(0),
            last_layer: None,
            is_announced: false,
            missing: Vec::new(),
            has_favourites: false,
        }
    }

    /// Epoch of the last request.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Experts of all layers.
    pub fn experts_total(&self) -> usize {
        self.seats.len()
    }

    /// Dense number of `key`, below `experts_total`; `None` for a key that the model does not have.
    pub fn index_of(&self, key: ExpertKey) -> Option<usize> {
        let layer = self.layer(key.layer).ok()?;
        (key.expert.0 < layer.experts).then(|| layer.base + usize::from(key.expert.0))
    }

    /// Size class of `layer`.
    pub fn class_of(&self, layer: LayerIdx) -> Option<usize> {
        self.layer(layer).ok().map(|l| l.class)
    }

    /// Whether `key` is cached (or on its way).
    pub fn contains(&self, key: ExpertKey) -> bool {
        self.index_of(key).is_some_and(|i| self.seats[i].is_present)
    }

    /// Number of size classes.
    pub fn classes(&self) -> usize {
        self.classes.len()
    }

    /// Slots of `class`.
    pub fn slots(&self, class: usize) -> usize {
        self.classes[class].slots
    }

    /// Cached experts of `class`.
    pub fn len(&self, class: usize) -> usize {
        self.classes[class].policy.len()
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.classes.iter().all(|c| c.policy.is_empty())
    }

    /// Checks a request without changing anything that a later request could see.
    pub fn check(&mut self, layer: LayerIdx, ids: &[ExpertIdx]) -> Result<(), RouteError> {
        let shape = self.layer(layer)?;
        let slots = self.classes[shape.class].slots;
        if ids.len() > slots {
            return Err(RouteError::TooMany { layer, asked: ids.len(), slots });
        }
        self.serial += 1;
        for &expert in ids {
            let key = ExpertKey { layer, expert };
            if expert.0 >= shape.experts {
                return Err(RouteError::UnknownExpert { key, experts: shape.experts });
            }
            let named = &mut self.seats[shape.base + usize::from(expert.0)].named;
            if *named == self.serial {
                return Err(RouteError::Duplicate { key });
            }
            *named = self.serial;
        }
        Ok(())
    }

    /// Serves `ids` of `layer`: writes one placement per id to `out` (cleared first), as `ids` are ordered. Cached ones
    /// are touched first, so that no victim is one of them. `is_held` names keys that must stay; the caller makes sure
    /// that held keys and this request fit the class together.
    pub fn request(
        &mut self,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        is_held: &mut dyn FnMut(ExpertKey) -> bool,
        out: &mut Vec<Placement>,
    ) -> Result<(), RouteError> {
        self.request_in(Phase::Decode, layer, ids, is_held, out)
    }

    /// As `request`. In prefill, once `favour` has been called, a request is no use: nearly every expert is asked for once,
    /// which says nothing. What it brings in leaves first, unless favoured.
    pub fn request_in(
        &mut self,
        phase: Phase,
        layer: LayerIdx,
        ids: &[ExpertIdx],
        is_held: &mut dyn FnMut(ExpertKey) -> bool,
        out: &mut Vec<Placement>,
    ) -> Result<(), RouteError> {
        self.check(layer, ids)?;
        out.clear();
        let shape = self.layer(layer)?;
        let is_next = self.last_layer.is_none_or(|last| layer <= last);
        if is_next && !self.is_announced {
            self.epoch.0 += 1;
        }
        self.is_announced = false;
        self.last_layer = Some(layer);
        let epoch = self.epoch;
        let is_passing = phase == Phase::Prefill && self.has_favourites;
        let policy = &mut self.classes[shape.class].policy;
        self.missing.clear();
        for (place, &expert) in ids.iter().enumerate() {
            let seat = &mut self.seats[shape.base + usize::from(expert.0)];
            seat.wanted_until = epoch;
            if !is_passing {
                seat.is_of_decode = phase == Phase::Decode;
            }
            if !seat.is_present {
                self.missing.push(place);
            } else if !is_passing {
                policy.touch(ExpertKey { layer, expert }, epoch);
            }
            out.push(Placement::Hit);
        }
        for i in 0..self.missing.len() {
            let place = self.missing[i];
            let (expert, index) = (ids[place], shape.base + usize::from(ids[place].0));
            let evict = self.make_room(shape.class, is_passing, is_held);
            let used = if is_passing && !self.seats[index].is_favoured { Epoch(0) } else { epoch };
            self.classes[shape.class].policy.insert(ExpertKey { layer, expert }, used);
            self.seats[index].is_present = true;
            out[place] = Placement::Fill { evict };
        }
        Ok(())
    }

    /// Says which experts of `layer` a sweep over many rows uses most, best first: as many as the layer's share of the slots count
    /// as used now, and stay when the sweep brings them in. What decode used keeps half of the slots, so the share is of the other
    /// half, or of more where decode has used less. Unknown experts are passed over.
    pub fn favour(&mut self, layer: LayerIdx, ids: &[ExpertIdx]) {
        let Ok(shape) = self.layer(layer) else { return };
        self.has_favourites = true;
        // A use is never in epoch 0, which precedes all requests.
        self.epoch = self.epoch.max(Epoch(1));
        let experts = shape.base..shape.base + usize::from(shape.experts);
        self.seats[experts].iter_mut().for_each(|seat| seat.is_favoured = false);
        let in_class = self.layers.iter().flatten().filter(|l| l.class == shape.class);
        let (mut layers, mut of_decode) = (0, 0);
        for layer in in_class {
            let experts = layer.base..layer.base + usize::from(layer.experts);
            layers += 1;
            of_decode += self.seats[experts].iter().filter(|seat| seat.is_present && seat.is_of_decode).count();
        }
        let slots = self.classes[shape.class].slots;
        let share = slots.saturating_sub(of_decode).max(slots / 2) / layers.max(1);
        for &expert in ids.iter().filter(|e| e.0 < shape.experts).take(share) {
            let index = shape.base + usize::from(expert.0);
            self.seats[index].is_favoured = true;
            if self.seats[index].is_present {
                self.classes[shape.class].policy.touch(ExpertKey { layer, expert }, self.epoch);
            }
        }
    }

    /// Slots of `class` that hold nothing worth keeping: empty ones, and those of experts that neither decode was the last to use nor
    /// the last `favour` of their layer named.
    pub fn slots_to_spare(&self, class: usize) -> usize {
        let in_class = self.layers.iter().flatten().filter(|l| l.class == class);
        let worth = in_class.map(|layer| {
            let seats = &self.seats[layer.base..layer.base + usize::from(layer.experts)];
            seats.iter().filter(|seat| seat.is_present && (seat.is_of_decode || seat.is_favoured)).count()
        });
        self.classes[class].slots.saturating_sub(worth.sum())
    }

    /// Adds `keys` without a use, most wanted first: the last of them are the first to leave. All must be absent, known and
    /// fit into free slots.
    pub fn preload(&mut self, keys: &[ExpertKey]) {
        // Of the keys that were never used the one that came last leaves first.
        keys.iter().for_each(|&key| self.preload_one(key));
    }

    fn preload_one(&mut self, key: ExpertKey) {
        let index = self.index_of(key).expect("preload of an expert that the model does not have");
        let class = self.class_of(key.layer).expect("its layer is known");
        let class = &mut self.classes[class];
        assert!(
            !self.seats[index].is_present && class.policy.len() < class.slots,
            "preload of {key} without a free slot for it"
        );
        // Epoch 0 precedes every request: a preloaded expert is pinned by nothing.
        class.policy.insert(key, Epoch(0));
        self.seats[index].is_present = true;
    }

    /// Starts the next epoch before its first request, so that `expect` and `prefetch` can speak of it. Optional.
    pub fn begin_token(&mut self) -> Epoch {
        self.epoch.0 += 1;
        self.last_layer = None;
        self.is_announced = true;
        self.epoch
    }

    /// Keeps a cached `key` through the current epoch, because a prediction names it. Returns whether it is cached.
    pub fn expect(&mut self, key: ExpertKey) -> bool {
        let (Some(index), Some(class)) = (self.index_of(key), self.class_of(key.layer)) else { return false };
        if !self.seats[index].is_present {
            return false;
        }
        self.seats[index].wanted_until = self.epoch;
        self.classes[class].policy.pin(key, self.epoch);
        true
    }

    /// Makes room for an absent `key` that a prediction names, and keeps it through the current epoch; first to leave
    /// after that unless used. Takes no slot of an expert that is held, used in this epoch or expected in it. `None`
    /// when the key is cached already or no slot may be taken.
    pub fn prefetch(&mut self, key: ExpertKey, is_held: &mut dyn FnMut(ExpertKey) -> bool) -> Option<Placement> {
        let (index, class) = (self.index_of(key)?, self.class_of(key.layer)?);
        if self.seats[index].is_present {
            return None;
        }
        let mut evict = None;
        if self.classes[class].policy.len() >= self.classes[class].slots {
            let (seats, now, layers) = (&self.seats, self.epoch, &self.layers);
            let number = |key: ExpertKey| layers[usize::from(key.layer.0)].map(|l| l.base + usize::from(key.expert.0));
            let mut must_stay =
                |key: ExpertKey| number(key).is_some_and(|i| seats[i].wanted_until >= now) || is_held(key);
            let victim = self.classes[class].policy.victim(now, &mut must_stay)?;
            let left = number(victim).expect("a victim was inserted through this directory");
            self.seats[left].is_present = false;
            evict = Some(victim);
        }
        // Epoch 0: it is not used yet, and a wrong prediction must leave no trace in the policy.
        self.classes[class].policy.insert(key, Epoch(0));
        self.classes[class].policy.pin(key, self.epoch);
        self.seats[index].wanted_until = self.epoch;
        self.seats[index].is_present = true;
        Some(Placement::Fill { evict })
    }

    /// One slot of `class` is gone for good. The caller has taken out what it held.
    pub fn lose_slot(&mut self, class: usize) {
        let class = &mut self.classes[class];
        class.slots = class.slots.saturating_sub(1);
        assert!(class.policy.len() <= class.slots, "a lost slot still holds an expert");
    }

    /// Takes out an expert whose bytes did not arrive.
    pub fn forget(&mut self, key: ExpertKey) {
        let Some(index) = self.index_of(key) else { return };
        let Some(class) = self.class_of(key.layer) else { return };
        self.classes[class].policy.remove(key);
        self.seats[index].is_present = false;
    }

    fn layer(&self, layer: LayerIdx) -> Result<Layer, RouteError> {
        self.layers.get(usize::from(layer.0)).copied().flatten().ok_or(RouteError::UnknownLayer { layer })
    }

    /// Frees one place in `class` if it is full; says who left. What `is_passing` takes no favourite's place while there is another.
    fn make_room(
        &mut self,
        class: usize,
        is_passing: bool,
        is_held: &mut dyn FnMut(ExpertKey) -> bool,
    ) -> Option<ExpertKey> {
        if self.classes[class].policy.len() < self.classes[class].slots {
            return None;
        }
        let (seats, serial, layers) = (&self.seats, self.serial, &self.layers);
        let index = |key: ExpertKey| layers[usize::from(key.layer.0)].map(|l| l.base + usize::from(key.expert.0));
        let (policy, epoch) = (&mut self.classes[class].policy, self.epoch);
        let mut must_stay = |key: ExpertKey, spares_favoured: bool| {
            let stays = |seat: &Seat| seat.named == serial || (spares_favoured && seat.is_favoured);
            index(key).is_some_and(|i| stays(&seats[i])) || is_held(key)
        };
        let mut victim = None;
        if is_passing {
            victim = policy.victim(epoch, &mut |key| must_stay(key, true));
        }
        let victim = victim.or_else(|| policy.victim(epoch, &mut |key| must_stay(key, false)));
        let victim = victim.expect("the caller keeps held experts and the request within the slots");
        let left = index(victim).expect("a victim was inserted through this directory");
        self.seats[left].is_present = false;
        Some(victim)
    }
}
