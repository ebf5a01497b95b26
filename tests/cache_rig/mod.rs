//! A small model file in memory and caches over it, for the tests of the expert cache. Owns the image and its layout.
//! Never checks anything but bytes. Surprising fact: slice sizes are odd on purpose, so that every skew occurs.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::Duration;

use cache_policy::{Directory, Lru, Phase, Policy};
use ds4::engine::slabs::{SlabClass, Slabs};
use ds4::quant::QuantType;
use ds4::storage::expert_cache::*;
use ds4::storage::layout::{ExpertTensor, LayerExperts};
use ds4::storage::reader::fake::{FakeOptions, FakeReader};
use ds4::storage::reader::*;
use ds4::units::{ExpertIdx, ExpertKey, LayerIdx};

pub const LAYERS: u16 = 4;
pub const EXPERTS: u16 = 16;

/// splitmix64: the tests' own randomness.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// `count` distinct experts, low numbers more often.
    pub fn ids(&mut self, count: usize) -> Vec<ExpertIdx> {
        let mut ids: Vec<ExpertIdx> = Vec::new();
        while ids.len() < count {
            let end = 1 + self.below(u64::from(EXPERTS));
            let id = ExpertIdx(self.below(end) as u16);
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids
    }
}

/// Layers 0, 1, 3 have experts of one size, layer 2 of a larger one.
pub fn layout() -> Vec<LayerExperts> {
    let mut offset = 77;
    let mut tensor = |slice_bytes: u64| {
        let t = ExpertTensor { ty: QuantType::Q2_K, rows: 1, cols: 1, offset, slice_bytes };
        offset += slice_bytes * u64::from(EXPERTS) + 13;
        t
    };
    (0..LAYERS)
        .map(|layer| {
            let [gate, up, down] = if layer == 2 { [3000, 3000, 4100] } else { [1001, 1001, 1517] };
            LayerExperts {
                layer: LayerIdx(layer),
                experts: EXPERTS,
                gate: tensor(gate),
                up: tensor(up),
                down: tensor(down),
            }
        })
        .collect()
}

pub fn image() -> Vec<u8> {
    let end = layout().iter().map(|l| l.down.offset + l.down.slice_bytes * u64::from(EXPERTS)).max().unwrap();
    (0..end + 100).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// No delay, and blocks so small that the middle of a slice belongs to no neighbour's aligned read.
pub fn quick() -> FakeOptions {
    FakeOptions { depth: 4, alignment: Alignment { offset: 64, memory: 64 }, ..FakeOptions::default() }
}

/// Delays, reorder, short reads, small pieces.
pub fn rough(seed: u64) -> FakeOptions {
    let limits = PoolLimits { piece_bytes: 1024, queue_requests_max: 8192 };
    FakeOptions {
        jitter: Duration::from_micros(200),
        short_of_256: 60,
        seed,
        depth: 6,
        limits,
        ..FakeOptions::default()
    }
}

pub fn lru(slots: usize) -> Box<dyn Policy> {
    Box::new(Lru::new(slots))
}

/// A cache over `reader` with so many slots in the large class and in the small one.
pub fn cache(reader: Arc<dyn Reader>, large: u64, small: u64) -> ExpertCache {
    cache_with(reader, large, small, Duration::from_secs(20))
}

pub fn cache_with(reader: Arc<dyn Reader>, large: u64, small: u64, hold_wait: Duration) -> ExpertCache {
    let layout = layout();
    let classes = size_classes(&layout, reader.alignment()).unwrap();
    let slabs = |class: &SizeClass, slots| SlabClass { slot_bytes: class.slot_bytes, slots };
    let memory = Slabs::allocate(&[slabs(&classes[0], large), slabs(&classes[1], small)]).unwrap().slots;
    let parts = CacheParts { reader, layout: &layout, classes: &classes, memory, policy: &lru, hold_wait };
    ExpertCache::new(parts).unwrap()
}

/// The same decisions without memory.
pub fn directory(large: usize, small: usize) -> Directory {
    let classes = size_classes(&layout(), Alignment::NONE).unwrap();
    let shape = |class: &SizeClass, slots| cache_policy::ClassShape { layers: class.layers.clone(), slots };
    Directory::new(&[shape(&classes[0], large), shape(&classes[1], small)], &lru)
}

pub fn fake(options: FakeOptions) -> Arc<FakeReader> {
    FakeReader::new(image(), options)
}

pub fn ids(list: &[u16]) -> Vec<ExpertIdx> {
    list.iter().map(|&i| ExpertIdx(i)).collect()
}

/// Compares the three slices with the image.
pub fn check_bytes(image: &[u8], layer: LayerIdx, expert: ExpertIdx, slices: [&[u8]; 3]) {
    let extents = layout()[usize::from(layer.0)].extents(expert);
    for (slice, extent) in slices.into_iter().zip(extents) {
        let want = &image[extent.offset as usize..(extent.offset + extent.len) as usize];
        assert!(slice == want, "wrong bytes for layer {} expert {}", layer.0, expert.0);
    }
}

/// Requests, takes every expert, checks its bytes; returns the order of positions.
pub fn take_all(
    cache: &ExpertCache,
    image: &[u8],
    layer: u16,
    wanted: &[ExpertIdx],
    phase: Phase,
) -> Result<Vec<usize>, CacheError> {
    let layer = LayerIdx(layer);
    let mut lease = cache.request(layer, wanted, phase)?;
    let mut order = Vec::new();
    while let Some(position) = lease.next_ready()? {
        check_bytes(image, layer, wanted[position], lease.slices(position));
        order.push(position);
    }
    assert_eq!(order.len(), wanted.len());
    // Bytes stay as long as the lease does.
    for &position in &order {
        check_bytes(image, layer, wanted[position], lease.slices(position));
    }
    Ok(order)
}

/// Nothing is held, nothing is under way, and every slot is accounted for.
pub fn assert_at_rest(cache: &ExpertCache) {
    let stats = cache.stats();
    assert_eq!((stats.slots_held, stats.slots_filling), (0, 0), "{stats:?}");
    let cached = cache.all_keys().into_iter().filter(|&k| cache.contains(k)).count() as u64;
    assert_eq!(cached, stats.slots_valid, "{stats:?}");
    assert!(stats.slots_valid <= stats.slots);
}

pub fn all_of(layer: u16) -> Vec<ExpertKey> {
    (0..EXPERTS).map(|e| ExpertKey::new(layer, e)).collect()
}
