//! Arbitrary bytes as a GGUF file: parsed, classified, written again. Owns nothing; must never panic.
//! Surprising fact: what the parser accepts, the writer must be able to write, so the round trip is checked too.
#![no_main]

use ds4::storage::gguf::{GgufWriter, TensorSpec, parse};
use ds4::storage::layout::Layout;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(directory) = parse(data, data.len() as u64) else { return };
    for tensor in directory.tensors() {
        assert!(tensor.offset + tensor.bytes <= data.len() as u64);
    }
    let _ = Layout::from_gguf(&directory);
    let spec = |t: &ds4::storage::gguf::TensorInfo| TensorSpec { name: t.name.clone(), ty: t.ty, dims: t.dims.clone() };
    let specs: Vec<TensorSpec> = directory.tensors().iter().map(spec).collect();
    let again = GgufWriter::new(directory.metadata(), &specs).expect("what was read can be written");
    assert_eq!(again.directory().metadata().len(), directory.metadata().len());
    assert_eq!(again.directory().tensors().len(), directory.tensors().len());
});
