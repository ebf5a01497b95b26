//! Host memory that kernels read by themselves: all of it, and experts in it whose products have the same bits.
//! Never compares with something computed on the same device. Surprising fact: sources begin at odd addresses, as slots do in which a file's bytes
//! landed.

use std::sync::Arc;

use ds4::backend::cpu::CpuBackend;
use ds4::backend::cpu::memory_rate::read;
use ds4::backend::cpu::pool::Pool;
use ds4::backend::cuda::{CudaBackend, HostAccess, MatShape, Registered, SLAB_ALIGN, Upload};
use ds4::backend::{Backend, ops};
use ds4::quant::QuantType;
use memmap2::MmapMut;

use crate::case::Rig;
use crate::kernels_common::{Rng, weights};

/// Bytes between the beginning of the memory and the first expert.
const GAP: usize = 77;

/// `bytes` in memory that kernels of `gpu` reach.
fn known(gpu: &CudaBackend, bytes: &[u8]) -> (Arc<MmapMut>, Registered) {
    let mut memory = MmapMut::map_anon(bytes.len()).unwrap();
    memory.copy_from_slice(bytes);
    let memory = Arc::new(memory);
    let at = memory.as_ptr().expose_provenance();
    let registered = gpu.register(at, bytes.len(), Arc::clone(&memory) as _, HostAccess::Kernels).unwrap();
    (memory, registered)
}

/// Products of three matrices of an expert with a row.
fn products<B: Backend>(b: &B, mats: [B::MatView<'_>; 3], shapes: [MatShape; 3], x: &[f32]) -> Vec<u32> {
    let mut all = Vec::new();
    for (w, shape) in mats.into_iter().zip(shapes) {
        let (mut row, mut out) = (b.alloc("x", shape.cols).unwrap(), b.alloc("out", shape.rows).unwrap());
        b.upload(&x[..shape.cols], &mut row, 0).unwrap();
        b.matmul(ops::Matmul { w, x: &row, rows: 1, groups: 1 }, &mut out).unwrap();
        let mut host = vec![0.0; shape.rows];
        b.download(&out, 0, &mut host).unwrap();
        all.extend(host.iter().map(|v| v.to_bits()));
    }
    all
}

/// Whether an expert of `ty` that kernels read in place gives what the processor computes, and was not copied.
fn has_same_bits(rng: &mut Rng, (cpu, gpu): (&CpuBackend, &CudaBackend), ty: QuantType, way: Upload) -> bool {
    let shapes = [(96, 512), (96, 512), (512, 256)].map(|(rows, cols)| MatShape { ty, rows, cols });
    let bytes = shapes.map(|s| weights(rng, ty, s.rows, s.cols));
    let x = rng.normals(512);
    let mut memory = vec![0xa5; GAP];
    let starts = [0, 1, 2].map(|i| {
        let start = memory.len();
        memory.extend(&bytes[i]);
        memory.push(0xa5);
        start
    });
    let (memory, registered) = known(gpu, &memory);
    let room = |i: usize| bytes[i].len().next_multiple_of(SLAB_ALIGN);
    let places = [0, room(0), room(0) + room(1)];
    let slab = gpu.slab("an expert", places[2] + room(2)).unwrap();
    let parts = [0, 1, 2].map(|i| (places[i], shapes[i], &memory[starts[i]..starts[i] + bytes[i].len()]));
    let before = gpu.device().counters();
    gpu.store_together(&slab, parts, &[registered], way).unwrap();
    // Who waits for uploads waits for what reads the memory; what runs beside the ops has ended then, too.
    gpu.device().wait_uploads().unwrap();
    let after = gpu.device().counters();
    let sum: usize = bytes.iter().map(Vec::len).sum();
    let was_read =
        after.in_place_bytes - before.in_place_bytes == sum as u64 && after.upload_bytes == before.upload_bytes;
    let found = products(gpu, [0, 1, 2].map(|i| gpu.stored(&slab, places[i], shapes[i])), shapes, &x);
    let loaded = [0, 1, 2].map(|i| cpu.load(ty, shapes[i].rows, shapes[i].cols, bytes[i].clone().into()).unwrap());
    was_read && found == products(cpu, [0, 1, 2].map(|i| cpu.view(&loaded[i])), shapes, &x)
}

pub fn check(rig: &mut Rig) {
    let mut results = Vec::new();
    if let Some((rng, cpu, gpu)) = rig.fast("in_place") {
        // More than one pass of all blocks, and a rest.
        for lines in [1usize, 1000, 300_001] {
            let bytes: Vec<u8> = (0..lines * 64).map(|_| rng.next() as u8).collect();
            let (_memory, registered) = known(gpu, &bytes);
            let expected = read(&Pool::new(2).unwrap(), &bytes);
            let found = gpu.words_of(&registered).unwrap();
            results.push((format!("memory_rate: {lines} lines of host memory"), found == Some(expected)));
        }
        gpu.read_in_place();
        let types = [
            QuantType::Q8_0,
            QuantType::MXFP4,
            QuantType::Q2_K,
            QuantType::Q3_K,
            QuantType::Q4_K,
            QuantType::Q6_K,
            QuantType::IQ2_XXS,
        ];
        for ty in types {
            for way in [Upload::InOrder, Upload::Aside { is_registered: true }] {
                let is_good = has_same_bits(rng, (cpu, gpu), ty, way);
                results.push((format!("in_place: experts of {ty}, {way:?}"), is_good));
            }
        }
    }
    results.into_iter().for_each(|(what, is_good)| rig.note(&what, is_good));
}
