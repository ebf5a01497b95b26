//! The writer: what it writes is read back, damage is noticed, and no half file stays behind.
//! Owns property tests of writer and parser; never looks inside either.
//! Surprising fact: a flipped bit may leave a valid file, so the property is "no panic", not "an error".

use std::path::Path;

use ds4::quant::QuantType;
use ds4::storage::gguf::{Array, GgufError, GgufFile, GgufWriter, Metadata, StringArray, TensorSpec, Value, parse};
use proptest::prelude::*;

fn value() -> impl Strategy<Value = Value> {
    let text = "\\PC{0,12}";
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        proptest::num::f32::NORMAL.prop_map(Value::F32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        proptest::num::f64::NORMAL.prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        text.prop_map(Value::Str),
        prop::collection::vec(any::<u32>(), 0..5000).prop_map(Value::from),
        prop::collection::vec(any::<u64>(), 0..20).prop_map(Value::from),
        prop::collection::vec(any::<bool>(), 0..20).prop_map(|v| Value::Array(Array::Bool(v))),
        prop::collection::vec(any::<i16>(), 0..20).prop_map(|v| Value::Array(Array::I16(v))),
        prop::collection::vec(text, 0..20).prop_map(|v| Value::from(v.iter().collect::<StringArray>())),
    ]
}

fn tensor_shape() -> impl Strategy<Value = (QuantType, Vec<u64>)> {
    (prop::sample::select(&QuantType::ALL[..]), 1u64..4, prop::collection::vec(1u64..4, 0..3)).prop_map(
        |(ty, blocks, rest)| {
            let columns = blocks * ty.block_values() as u64;
            (ty, [vec![columns], rest].concat())
        },
    )
}

/// Metadata, tensors and the alignment of one file.
fn content() -> impl Strategy<Value = (Metadata, Vec<TensorSpec>)> {
    let keys = prop::collection::btree_map("[a-z.]{1,12}", value(), 0..8);
    let tensors = prop::collection::btree_map("[a-z.0-9]{1,20}", tensor_shape(), 0..6);
    (keys, tensors, 0u32..8).prop_map(|(keys, tensors, shift)| {
        let mut metadata = Metadata::new();
        for (key, value) in keys {
            metadata.insert(key, value);
        }
        metadata.insert("general.alignment", 16u32 << shift);
        let specs = tensors.into_iter().map(|(name, (ty, dims))| TensorSpec { name, ty, dims }).collect();
        (metadata, specs)
    })
}

/// Data byte `i` of tensor `t`: arbitrary, and different for neighbours.
fn data(t: usize, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i as usize * 7 + t * 31) as u8).collect()
}

fn write(path: &Path, metadata: &Metadata, specs: &[TensorSpec]) {
    let writer = GgufWriter::new(metadata, specs).unwrap();
    let sizes: Vec<u64> = writer.directory().tensors().iter().map(|t| t.bytes).collect();
    let mut out = writer.create(path, true).unwrap();
    for (t, spec) in specs.iter().enumerate() {
        out.begin(&spec.name).unwrap();
        // Uneven pieces must not matter.
        for piece in data(t, sizes[t]).chunks(1000) {
            out.append(piece).unwrap();
        }
    }
    out.finish().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read_back((metadata, specs) in content()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        write(&path, &metadata, &specs);
        let file = GgufFile::open(&path).unwrap();
        prop_assert_eq!(file.metadata(), &metadata);
        prop_assert_eq!(file.tensors().len(), specs.len());
        let bytes = std::fs::read(&path).unwrap();
        prop_assert_eq!(bytes.len() as u64, file.file_len());
        for (t, (tensor, spec)) in file.tensors().iter().zip(&specs).enumerate() {
            prop_assert_eq!((&tensor.name, tensor.ty, &tensor.dims), (&spec.name, spec.ty, &spec.dims));
            prop_assert!(tensor.offset.is_multiple_of(u64::from(file.alignment())));
            let range = tensor.offset as usize..(tensor.offset + tensor.bytes) as usize;
            prop_assert_eq!(&bytes[range], &data(t, tensor.bytes)[..]);
        }
        write(&path, &metadata, &specs);
        prop_assert_eq!(std::fs::read(&path).unwrap(), bytes, "the same content gives the same bytes");
    }

    #[test]
    fn damage_never_panics((metadata, specs) in content(), at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        write(&path, &metadata, &specs);
        let whole = std::fs::read(&path).unwrap();
        let header = GgufFile::open(&path).unwrap().data_start() as usize;
        let mut flipped = whole.clone();
        flipped[at.index(header)] ^= 1 << bit;
        if let Ok(directory) = parse(flipped.as_slice(), flipped.len() as u64) {
            for tensor in directory.tensors() {
                prop_assert!(tensor.offset + tensor.bytes <= flipped.len() as u64);
            }
        }
        let short = &whole[..cut.index(whole.len())];
        let parsed = parse(short, short.len() as u64);
        let kept = GgufFile::open(&path).unwrap().tensors().iter().map(|t| t.offset + t.bytes).max();
        // Only padding may be cut off without being noticed.

        if (short.len() as u64) < kept.unwrap_or(0) {
            prop_assert!(parsed.is_err());
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = parse(bytes.as_slice(), bytes.len() as u64);
        let prefixed = [b"GGUF\x03\0\0\0".as_slice(), &bytes].concat();
        let _ = parse(prefixed.as_slice(), prefixed.len() as u64);
    }
}

fn two_tensors() -> (Metadata, Vec<TensorSpec>) {
    let spec = |name: &str| TensorSpec { name: name.into(), ty: QuantType::F32, dims: vec![4] };
    (Metadata::new(), vec![spec("a"), spec("b")])
}

fn files_in(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn an_unfinished_file_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let (metadata, specs) = two_tensors();
    let mut out = GgufWriter::new(&metadata, &specs).unwrap().create(&path, false).unwrap();
    out.begin("a").unwrap();
    out.append(&[0; 16]).unwrap();
    assert_eq!(files_in(folder.path()), 1, "the temporary file lies beside the target");
    drop(out);
    assert_eq!(files_in(folder.path()), 0);
}

#[test]
fn order_and_lengths_are_enforced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let (metadata, specs) = two_tensors();
    let create = || GgufWriter::new(&metadata, &specs).unwrap().create(&path, false).unwrap();
    let mut out = create();
    assert!(matches!(out.append(&[0]), Err(GgufError::WriteOrder { .. })));
    assert!(matches!(out.begin("b"), Err(GgufError::WriteOrder { .. })));
    out.begin("a").unwrap();
    assert!(matches!(out.append(&[0; 17]), Err(GgufError::WriteLength { .. })));
    out.append(&[0; 15]).unwrap();
    assert!(matches!(out.begin("b"), Err(GgufError::WriteLength { written: 15, .. })));
    out.append(&[0]).unwrap();
    assert!(matches!(out.finish(), Err(GgufError::WriteOrder { .. })));
    assert_eq!(files_in(folder.path()), 0);
}

#[test]
fn an_existing_file_is_kept_without_force() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let (metadata, specs) = two_tensors();
    std::fs::write(&path, "mine").unwrap();
    let refused = GgufWriter::new(&metadata, &specs).unwrap().create(&path, false);
    assert!(matches!(refused, Err(GgufError::Exists { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    // It may also appear while the file is being written.
    std::fs::remove_file(&path).unwrap();
    let mut out = GgufWriter::new(&metadata, &specs).unwrap().create(&path, false).unwrap();
    for name in ["a", "b"] {
        out.begin(name).unwrap();
        out.append(&[0; 16]).unwrap();
    }
    std::fs::write(&path, "mine").unwrap();
    assert!(matches!(out.finish(), Err(GgufError::Exists { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    write(&path, &metadata, &specs);
    assert!(GgufFile::open(&path).is_ok());
    assert_eq!(files_in(folder.path()), 1);
}

#[test]
fn what_the_parser_refuses_is_not_written() {
    let (metadata, mut specs) = two_tensors();
    specs[1].name = "a".into();
    assert!(matches!(GgufWriter::new(&metadata, &specs), Err(GgufError::DuplicateTensor { .. })));
    specs[1] = TensorSpec { name: "b".into(), ty: QuantType::Q4_K, dims: vec![128] };
    assert!(matches!(GgufWriter::new(&metadata, &specs), Err(GgufError::RowBlocks { .. })));
    let mut odd = Metadata::new();
    odd.insert("general.alignment", 24u32);
    assert!(matches!(GgufWriter::new(&odd, &[]), Err(GgufError::Alignment { .. })));
    let spec = TensorSpec { name: "t".into(), ty: QuantType::F32, dims: vec![u64::MAX / 8, 64] };
    assert!(matches!(GgufWriter::new(&Metadata::new(), &[spec]), Err(GgufError::SizeOverflow { .. })));
}

#[test]
fn identity_follows_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let (metadata, specs) = two_tensors();
    write(&path, &metadata, &specs);
    let first = GgufFile::open(&path).unwrap().identity();
    assert_eq!(first, GgufFile::open(&path).unwrap().identity());
    write(&path, &metadata, &specs);
    assert_ne!(first, GgufFile::open(&path).unwrap().identity(), "a replaced file is another file");
}
