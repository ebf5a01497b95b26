//! Experts that the device finds by itself: the same bits as on the processor whoever is absent, and no pass that never ends.
//! Never compares with something computed on the same device. Surprising fact: the checks run in order on one table, since what a pass
//! that was given up leaves behind is a part of them.

use std::time::{Duration, Instant};

use ds4::backend::cpu::CpuBackend;
use ds4::backend::cuda::{
    CudaBackend, CudaSlab, ExpertShape, MatShape, Room, SLAB_ALIGN, SlotPass, SlotTable, Told, Upload,
};
use ds4::backend::{Backend, ops};
use ds4::quant::QuantType;

use crate::case::Rig;
use crate::kernels_common::{Rng, weights};

const EXPERTS: usize = 9;
const K: usize = 4;
const LAYERS: usize = 3;
const LIMIT: f32 = 7.0;
/// How long a gate stays closed though its experts could come.
const HELD: Duration = Duration::from_millis(4);

/// One layer's experts on both sides.
struct Layer {
    shape: ExpertShape,
    bytes: Vec<[Vec<u8>; 3]>,
    x: Vec<f32>,
    slot_bytes: usize,
}

impl Layer {
    fn new(rng: &mut Rng, [first, last]: [QuantType; 2], (hidden, width): (usize, usize)) -> Self {
        let gate = MatShape { ty: first, rows: width, cols: hidden };
        let down = MatShape { ty: last, rows: hidden, cols: width };
        let mut make = |s: MatShape| weights(rng, s.ty, s.rows, s.cols);
        let bytes = (0..EXPERTS).map(|_| [make(gate), make(gate), make(down)]).collect();
        let room = |s: MatShape| s.bytes().unwrap().next_multiple_of(SLAB_ALIGN);
        let shape = ExpertShape { gate, down, hidden, width, limit: LIMIT };
        Self { shape, bytes, x: rng.normals(hidden), slot_bytes: 2 * room(gate) + room(down) }
    }

    fn shapes(&self) -> [MatShape; 3] {
        [self.shape.gate, self.shape.gate, self.shape.down]
    }

    fn offsets(&self) -> [usize; 2] {
        let room = self.shape.gate.bytes().unwrap().next_multiple_of(SLAB_ALIGN);
        [room, 2 * room]
    }

    fn store(&self, gpu: &CudaBackend, slab: &CudaSlab, expert: usize, way: Upload) {
        let at = expert * self.slot_bytes;
        for ((shape, bytes), at) in
            self.shapes().into_iter().zip(&self.bytes[expert]).zip([at, at + self.offsets()[0], at + self.offsets()[1]])
        {
            gpu.store(slab, at, shape, bytes, way).unwrap();
        }
    }

    /// Outputs by rising id, from the processor.
    fn expected(&self, cpu: &CpuBackend, ids: [i32; K]) -> Vec<f32> {
        let (hidden, width) = (self.shape.hidden, self.shape.width);
        let mut sorted = ids;
        sorted.sort_unstable();
        let load = |expert: i32| -> Vec<_> {
            let all = self.shapes().into_iter().zip(&self.bytes[expert as usize]);
            all.map(|(s, bytes)| cpu.load(s.ty, s.rows, s.cols, bytes.clone().into()).unwrap()).collect()
        };
        let mats: Vec<_> = sorted.iter().map(|id| load(*id)).collect();
        let mut experts = Vec::new();
        for (place, m) in mats.iter().enumerate() {
            let [gate, up, down] = [0, 1, 2].map(|i| cpu.view(&m[i]));
            experts.push(ops::PlacedExpert { gate, up, down, place });
        }
        let mut x = cpu.alloc("x", hidden).unwrap();
        cpu.upload(&self.x, &mut x, 0).unwrap();
        let [mut gate, mut up, mut y] = [width, width, hidden].map(|len| cpu.alloc("work", len).unwrap());
        let mut outputs = cpu.alloc("outputs", K * hidden).unwrap();
        let op = ops::ExpertsRow { x: &x, experts: &experts, hidden, width, limit: LIMIT };
        let out = ops::ExpertsOut { gate: &mut gate, up: &mut up, y: &mut y, outputs: &mut outputs };
        cpu.experts_row(op, out).unwrap();
        let mut found = vec![0.0; K * hidden];
        cpu.download(&outputs, 0, &mut found).unwrap();
        found
    }
}

/// Waits for what the device tells; a minute is for ever.
fn told(pass: &SlotPass<'_>, layer: usize) -> Told {
    let begun = Instant::now();
    loop {
        if let Some(told) = pass.told(layer) {
            return told;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "layer {layer} tells nothing");
        std::hint::spin_loop();
    }
}

/// Device memory of a row.
struct Row<B: Backend> {
    x: B::Buf,
    ids: B::Ids,
    weights: B::Buf,
    sorted: B::Buf,
    outputs: B::Buf,
}

impl Row<CudaBackend> {
    fn new(gpu: &CudaBackend, hidden: usize) -> Self {
        let buf = |len| gpu.alloc("row", len).unwrap();
        Self {
            x: buf(hidden),
            ids: gpu.alloc_ids("ids", K).unwrap(),
            weights: buf(K),
            sorted: buf(K),
            outputs: buf(K * hidden),
        }
    }

    /// Queues a whole layer.
    fn queue(&mut self, gpu: &CudaBackend, pass: &SlotPass<'_>, layer: &Layer, at: usize, ids: [i32; K]) {
        gpu.upload(&layer.x, &mut self.x, 0).unwrap();
        gpu.upload_ids(&ids, &mut self.ids, 0).unwrap();
        gpu.upload(&ids.map(|id| id as f32 + 0.5), &mut self.weights, 0).unwrap();
        pass.resolve(at, K, (&self.ids, &self.weights), &mut self.sorted).unwrap();
        pass.experts(at, (layer.shape, layer.offsets()), (&self.x, K), &mut self.outputs).unwrap();
    }

    fn holds(&self, gpu: &CudaBackend, expected: &[f32], mut ids: [i32; K]) -> bool {
        let (mut outputs, mut sorted) = (vec![f32::NAN; expected.len()], [0.0; K]);
        gpu.download(&self.outputs, 0, &mut outputs).unwrap();
        gpu.download(&self.sorted, 0, &mut sorted).unwrap();
        ids.sort_unstable();
        let same = outputs.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
        same && sorted == ids.map(|id| id as f32 + 0.5)
    }
}

/// What did not hold, in words.
fn ensure(is_good: bool, what: &'static str) -> Result<(), &'static str> {
    if is_good { Ok(()) } else { Err(what) }
}

fn checked(
    rng: &mut Rng,
    (cpu, gpu): (&CpuBackend, &CudaBackend),
    types: [QuantType; 2],
    takes_times: bool,
) -> Result<(), &'static str> {
    let layer = Layer::new(rng, types, (512, 256));
    let slab = gpu.slab("slots", EXPERTS * layer.slot_bytes).unwrap();
    let table: SlotTable = gpu.slot_table(LAYERS, EXPERTS).unwrap();
    let at = 1;
    let entry = |expert: i32| at * EXPERTS + expert as usize;
    let address = |expert: i32| gpu.address(&slab, expert as usize * layer.slot_bytes);
    let room = Room { hidden: layer.shape.hidden, width: layer.shape.width, k: K, is_registered: false };
    let mut row = Row::<CudaBackend>::new(gpu, layer.shape.hidden);
    let (ids, missing): ([i32; K], [i32; 2]) = ([6, 2, 7, 3], [7, 2]);
    let expected = layer.expected(cpu, ids);
    [6, 3].iter().for_each(|id| layer.store(gpu, &slab, *id as usize, Upload::InOrder));
    table.rewrite([6, 3].into_iter().map(|id| (entry(id), address(id)))).unwrap();

    // Nobody answers: the pass is given up, and ends.
    let pass = table.begin(gpu, room).unwrap();
    row.queue(gpu, &pass, &layer, at, ids);
    let first = told(&pass, at);
    drop(pass);
    ensure(first.ids[..K] == ids && !first.are_all, "a pass that nobody answers tells what is absent")?;

    // Two absent experts come, after a while: the gate says how long it held.
    gpu.device().begin_times().unwrap();
    let pass = table.begin(gpu, room).unwrap();
    row.queue(gpu, &pass, &layer, at, ids);
    ensure(!told(&pass, at).are_all, "two are told to be absent")?;
    ensure(pass.is_running().unwrap(), "the pass stands at its gate")?;
    let asked = Instant::now();
    std::thread::sleep(HELD);
    missing.iter().for_each(|id| layer.store(gpu, &slab, *id as usize, Upload::Aside { is_registered: false }));
    pass.open(at, &missing.map(|id| (entry(id), address(id)))).unwrap();
    pass.end().unwrap();
    ensure(row.holds(gpu, &expected, ids), "outputs with two that came late")?;
    let (busy, held) = (gpu.device().end_times().unwrap_or(0), table.times().stalled_ns().unwrap_or(0));
    ensure(!takes_times || HELD.as_nanos() / 2 <= u128::from(held), "the gate says how long it held")?;
    ensure(
        held <= busy && u128::from(held) <= asked.elapsed().as_nanos(),
        "a gate holds no longer than the whole took",
    )?;

    // Then all are there, in another order of the router.
    let ids = [3, 7, 2, 6];
    let pass = table.begin(gpu, room).unwrap();
    row.queue(gpu, &pass, &layer, at, ids);
    ensure(told(&pass, at).are_all, "all are there")?;
    pass.end().unwrap();
    ensure(row.holds(gpu, &expected, ids), "outputs in another order of the router")?;
    ensure(table.times().stalled_ns().is_none(), "no time without a request for times")?;

    // One left: it is absent again.
    let pass = table.begin(gpu, room).unwrap();
    pass.open(0, &[(entry(7), 0)]).unwrap();
    gpu.device().settle();
    row.queue(gpu, &pass, &layer, at, ids);
    ensure(!told(&pass, at).are_all, "one that left is absent")?;
    pass.open(at, &[(entry(7), address(7))]).unwrap();
    pass.end().unwrap();
    ensure(row.holds(gpu, &expected, ids), "outputs with one that came back")?;
    guessed(gpu, &table, (&layer, room, &slab), &expected)
}

/// Experts that come before their layer has chosen: told, found if they are there, waited for if they are on their way; and what a pass that is
/// given up with guesses in flight leaves behind.
fn guessed(
    gpu: &CudaBackend,
    table: &SlotTable,
    (layer, room, slab): (&Layer, Room, &CudaSlab),
    expected: &[f32],
) -> Result<(), &'static str> {
    let (at, ids): (usize, [i32; K]) = (2, [3, 7, 2, 6]);
    let entry = |expert: i32| at * EXPERTS + expert as usize;
    let address = |expert: i32| gpu.address(slab, expert as usize * layer.slot_bytes);
    let bring = |pass: &SlotPass<'_>, expert: i32| {
        layer.store(gpu, slab, expert as usize, Upload::Aside { is_registered: false });
        pass.mark_copy().unwrap();
        pass.change(&[(entry(expert), address(expert))]).unwrap();
    };
    let mut row = Row::<CudaBackend>::new(gpu, layer.shape.hidden);
    let named = |pass: &SlotPass<'_>, row: &mut Row<CudaBackend>, ids: [i32; K]| {
        gpu.upload_ids(&ids, &mut row.ids, 0).unwrap();
        pass.tell_guess(at, &row.ids, 3).unwrap();
        let begun = Instant::now();
        while pass.guess(at).is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "no guess is told");
        }
        pass.guess(at).unwrap()[..3] == ids[..3]
    };

    // All of them are brought before the layer chooses: nothing is asked of the host.
    let pass = table.begin(gpu, room).unwrap();
    ensure(pass.guess(at).is_none() && pass.guess(0).is_none(), "no guess before one is told")?;
    ensure(named(&pass, &mut row, [7, 3, 5, 0]), "a guess is told")?;
    ids.iter().for_each(|id| bring(&pass, *id));
    gpu.device().settle();
    ensure(pass.has_copied().unwrap(), "what was brought ahead has arrived")?;
    row.queue(gpu, &pass, layer, at, ids);
    ensure(told(&pass, at).are_all, "what was brought ahead is found")?;
    pass.end().unwrap();
    ensure(row.holds(gpu, expected, ids), "outputs of what was brought ahead")?;

    // One leaves again and comes late: behind the gate, which the host opens without an upload of its own.
    let pass = table.begin(gpu, room).unwrap();
    ensure(
        pass.guess(at).is_none() && named(&pass, &mut row, [2, 8, 1, 0]),
        "the guess of this pass, not of the last",
    )?;
    pass.change(&[(entry(2), 0), (entry(8), address(8))]).unwrap();
    gpu.device().settle();
    row.queue(gpu, &pass, layer, at, ids);
    ensure(!told(&pass, at).are_all, "one on its way is absent")?;
    bring(&pass, 2);
    pass.open(at, &[(entry(8), 0)]).unwrap();
    pass.end().unwrap();
    ensure(row.holds(gpu, expected, ids), "outputs with one that was on its way")?;

    // A pass is given up with its gate closed and a guess on its way.
    let pass = table.begin(gpu, room).unwrap();
    pass.change(&[(entry(6), 0)]).unwrap();
    gpu.device().settle();
    row.queue(gpu, &pass, layer, at, ids);
    ensure(!told(&pass, at).are_all, "one is absent as the pass is given up")?;
    bring(&pass, 4);
    drop(pass);
    table.rewrite(ids.iter().map(|id| (entry(*id), address(*id)))).unwrap();
    let pass = table.begin(gpu, room).unwrap();
    row.queue(gpu, &pass, layer, at, ids);
    ensure(told(&pass, at).are_all, "all are there after a pass that was given up")?;
    pass.end().unwrap();
    ensure(row.holds(gpu, expected, ids), "outputs after a pass that was given up")
}

/// All of it for pairs of types.
pub fn check(rig: &mut Rig) {
    use QuantType::{IQ2_XXS, MXFP4, Q2_K, Q4_K, Q8_0};
    for types in [[IQ2_XXS, Q2_K], [Q4_K, Q4_K], [Q8_0, Q8_0], [MXFP4, Q8_0]] {
        let takes_times = rig.takes_times();
        let Some((rng, cpu, gpu)) = rig.fast("slots") else { return };
        let result = checked(rng, (cpu, gpu), types, takes_times);
        rig.note(&format!("slots: experts of {}, {} found by the device", types[0], types[1]), result.is_ok());
        if let Err(what) = result {
            println!("    what did not hold: {what}");
        }
    }
}
