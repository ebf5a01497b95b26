//! The memory of the expert cache against the plan, on this process. Alone in its binary, since peaks are per process.
//! Owns nothing. Surprising fact: the arena costs nothing until slots are filled, and never more than the plan afterwards.

mod cache_rig;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cache_policy::plan::{Budget, Request, plan};
use cache_rig::lru;
use ds4::engine::slabs::{SlabClass, Slabs};
use ds4::quant::QuantType;
use ds4::storage::expert_cache::*;
use ds4::storage::layout::{ExpertTensor, LayerExperts};
use ds4::storage::reader::*;
use ds4::sys;
use ds4::units::{Bytes, ExpertIdx, LayerIdx};

/// 4 layers of 32 experts of 768 KiB over one sparse file: 96 MiB.
fn model() -> (tempfile::TempDir, std::path::PathBuf, Vec<LayerExperts>) {
    let slice_bytes = 256 << 10;
    let tensor =
        |at: u64| ExpertTensor { ty: QuantType::Q2_K, rows: 1, cols: 1, offset: at * 32 * slice_bytes, slice_bytes };
    let layer = |l: u16| {
        let at = u64::from(l) * 3;
        let [gate, up, down] = [tensor(at), tensor(at + 1), tensor(at + 2)];
        LayerExperts { layer: LayerIdx(l), experts: 32, gate, up, down }
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::File::create(&path).unwrap().set_len(4 * 3 * 32 * slice_bytes).unwrap();
    (dir, path, (0..4).map(layer).collect())
}

#[test]
fn the_peak_stays_within_the_plan_and_can_be_reset() {
    let (_dir, path, layout) = model();
    // Buffered pread on purpose: pages of the file cache are not this process's memory.
    let options = ReaderOptions { io: ReaderChoice::Pread, direct: DirectChoice::Off, ..ReaderOptions::default() };
    let reader = open_reader(&path, &options).unwrap();
    let classes = size_classes(&layout, reader.alignment()).unwrap();
    let process = sys::process_memory().unwrap().resident;
    let request = Request {
        process,
        classes: classes.iter().map(SizeClass::request).collect(),
        top_k: 4,
        ctx: 1,
        is_streaming: true,
        budget: Budget::Slots(64),
        ..Request::default()
    };
    let plan = plan(&sys::memory_facts().unwrap(), &request).unwrap();
    let slabs: Vec<_> = plan.classes.iter().map(|c| SlabClass { slot_bytes: c.slot_bytes, slots: c.slots }).collect();
    // What is left out here goes at once: it would keep the mapping.
    let Slabs { slots, arena, .. } = Slabs::allocate(&slabs).unwrap();
    assert_eq!(arena, plan.cache);
    let parts = CacheParts {
        reader: Arc::clone(&reader),
        layout: &layout,
        classes: &classes,
        memory: slots,
        policy: &lru,
        hold_wait: HOLD_WAIT,
    };
    let cache = ExpertCache::new(parts).unwrap();
    assert_eq!((cache.arena(), cache.slots() as u64), (plan.cache, plan.cache_slots));

    sys::reset_peak().unwrap();
    let empty = sys::process_memory().unwrap();
    assert!(empty.peak.0 < process.0 + (8 << 20), "an empty arena is resident: {empty:?}");
    cache.preload(&cache.all_keys(), &mut |_| ControlFlow::Continue(())).unwrap();
    for token in 0..40u16 {
        for layer in 0..4 {
            let ids: Vec<_> = (0..4).map(|i| ExpertIdx((token * 3 + i * 5 + layer) % 32)).collect();
            let mut lease = cache.request(LayerIdx(layer), &ids, cache_policy::Phase::Decode).unwrap();
            while lease.next_ready().unwrap().is_some() {}
        }
    }
    assert!(cache.stats().decode.evictions > 0);
    let full = sys::process_memory().unwrap();
    assert!(full.peak >= Bytes(plan.cache.0), "the slots were filled: {full:?}");
    // 4 MiB for reader threads and allocator on top of what the process had at the plan.
    assert!(full.peak.0 <= plan.total().0 + (4 << 20), "peak {} against plan {}", full.peak, plan.total());
    drop(cache);
    // The last guard may go on a reader thread, a moment later.
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        sys::reset_peak().unwrap();
        let after = sys::process_memory().unwrap();
        if after.peak.0 < full.peak.0 - plan.cache.0 / 2 {
            break;
        }
        assert!(Instant::now() < give_up, "the arena goes with the cache: {after:?} after {full:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
