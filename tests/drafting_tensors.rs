//! Model files that carry tensors of a drafting block: they load, and those tensors stay on the drive.
//! Never runs such a block. Surprising fact: the tensors here are as large as the model's own, so that loading them by mistake would show.

mod engine_rig;

use std::fs;
use std::path::PathBuf;

use ds4::cli::gguf::describe;
use ds4::engine::options::EngineOptions;
use ds4::quant::QuantType;
use ds4::session::timeline::Timeline;
use ds4::storage::gguf::{GgufFile, GgufWriter, TensorSpec};
use ds4::storage::layout::Layout;
use engine_rig::made_models::{b, folder};
use engine_rig::{open, options, prompt, trail};

const EXTRA: [(&str, &[u64]); 3] = [
    ("mtp.0.norm.weight", &[128]),
    ("mtp.0.ffn_gate_exps.weight", &[128, 64, 8]),
    ("mtp.2.markov_head.markov_w1.weight", &[128, 640]),
];

/// Model b with a drafting block's tensors, full of what would spoil every sum.
fn with_drafting() -> PathBuf {
    let (file, bytes) = (GgufFile::open(b()).unwrap(), fs::read(b()).unwrap());
    let own = file.tensors().iter().map(|t| TensorSpec { name: t.name.clone(), ty: t.ty, dims: t.dims.clone() });
    let extra = EXTRA.map(|(name, dims)| TensorSpec { name: name.into(), ty: QuantType::F32, dims: dims.to_vec() });
    // First, so that every tensor of the model lies elsewhere.
    let specs: Vec<TensorSpec> = extra.into_iter().chain(own).collect();
    let path = folder().join("b-drafting.gguf");
    let mut out = GgufWriter::new(file.metadata(), &specs).unwrap().create(&path, true).unwrap();
    for spec in &specs {
        out.begin(&spec.name).unwrap();
        match file.tensor(&spec.name) {
            Some(t) => out.append(&bytes[t.offset as usize..][..t.bytes as usize]).unwrap(),
            None => {
                let values = spec.dims.iter().product::<u64>() as usize;
                out.append(&f32::NAN.to_le_bytes().repeat(values)).unwrap();
            }
        }
    }
    out.finish().unwrap();
    path
}

#[test]
fn drafting_tensors_are_neither_loaded_nor_an_error() {
    let path = with_drafting();
    let (plain, drafting) = (GgufFile::open(b()).unwrap(), GgufFile::open(&path).unwrap());
    assert_eq!(drafting.tensors().len(), plain.tensors().len() + 3);
    let resident = |file: &GgufFile| Layout::from_gguf(file).unwrap().resident_bytes;
    assert_eq!(resident(&drafting), resident(&plain));
    let text = describe(&path).unwrap();
    assert!(text.contains("\n  drafting       3 tensors"), "{text}");
    assert!(!describe(b()).unwrap().contains("\n  drafting"));
    for is_streaming in [false, true] {
        let run = |path: &PathBuf| {
            let engine = open(&EngineOptions { is_streaming, ..options(path) });
            let vocab = engine.tokenizer().tokens_total();
            let mut timeline = Timeline::new(engine.runner().unwrap());
            let trail = trail(&mut timeline, &prompt(40, vocab), 8).unwrap();
            (trail.bits, engine.plan().resident)
        };
        assert!(run(&path) == run(&b().to_path_buf()), "streaming: {is_streaming}");
    }
}
