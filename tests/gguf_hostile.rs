//! Every way a GGUF header can lie has an error of its own. Owns a byte-level builder that can lie; never touches files
//! except to open them. Surprising fact: the honest base file is parsed first, so each case differs by one lie.

use ds4::storage::gguf::{Directory, GgufError, GgufFile, limits, parse};

/// Little-endian bytes of a header under construction.
#[derive(Clone, Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
    fn u32(self, v: u32) -> Self {
        self.raw(&v.to_le_bytes())
    }
    fn u64(self, v: u64) -> Self {
        self.raw(&v.to_le_bytes())
    }
    fn string(self, s: &str) -> Self {
        self.u64(s.len() as u64).raw(s.as_bytes())
    }
    fn header(version: u32, tensors: u64, keys: u64) -> Self {
        Bytes::default().raw(b"GGUF").u32(version).u64(tensors).u64(keys)
    }
    /// Directory entry.
    fn tensor(self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        let with_dims = self.string(name).u32(dims.len() as u32);
        dims.iter().fold(with_dims, |b, &d| b.u64(d)).u32(ty).u64(offset)
    }
    /// Pads to 32 and appends `data` zero bytes.
    fn data(mut self, data: usize) -> Self {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + data, 0);
        self
    }
    fn parse(&self) -> Result<Directory, GgufError> {
        parse(self.0.as_slice(), self.0.len() as u64)
    }
}

fn fails(bytes: Bytes, text: &str) {
    let error = bytes.parse().expect_err(text).to_string();
    assert!(error.contains(text), "{error:?} lacks {text:?}");
}

/// A file with one key and then whatever follows the key's name.
fn with_key(rest: impl FnOnce(Bytes) -> Bytes) -> Bytes {
    rest(Bytes::header(3, 0, 1).string("k"))
}

/// A file with one F32 tensor of these dimensions.
fn with_tensor(dims: &[u64], ty: u32, offset: u64, data: usize) -> Bytes {
    Bytes::header(3, 1, 0).tensor("t", dims, ty, offset).data(data)
}

#[test]
fn the_honest_base_is_read() {
    for version in [2, 3] {
        let file = Bytes::header(version, 2, 1)
            .string("general.name")
            .u32(8)
            .string("x")
            .tensor("a", &[4, 2], 0, 0)
            .tensor("b", &[32], 8, 32)
            .data(66);
        let directory = file.parse().unwrap();
        assert_eq!(directory.version(), version);
        assert_eq!(directory.metadata().str("general.name"), Ok("x"));
        let b = directory.tensor("b").unwrap();
        assert_eq!((b.offset, b.bytes), (directory.data_start() + 32, 34));
        assert_eq!((b.columns(), b.rows()), (32, 1));
    }
}

#[test]
fn the_start_of_the_file() {
    fails(Bytes::default(), "truncated: the magic");
    fails(Bytes::default().raw(b"GGML\0\0\0\0"), "not a GGUF file");
    fails(Bytes::header(1, 0, 0), "GGUF version 1");
    fails(Bytes::header(4, 0, 0), "GGUF version 4");
    fails(Bytes::header(3u32.swap_bytes(), 0, 0), "big-endian GGUF (version 3)");
    fails(Bytes::header(3, u64::MAX, 0), "18446744073709551615 tensors: more than the limit");
    fails(Bytes::header(3, 0, u64::MAX), "18446744073709551615 metadata keys: more than the limit");
    fails(Bytes::header(3, 0, 1000), "truncated: metadata keys");
    fails(Bytes::header(3, 1000, 0), "truncated: the tensor directory");
}

#[test]
fn keys_and_values() {
    fails(Bytes::header(3, 0, 1).u64(u64::MAX).raw(&[0; 32]), "metadata key of 18446744073709551615 bytes");
    fails(Bytes::header(3, 0, 1).u64(60).raw(&[b'k'; 20]), "truncated: metadata key");
    fails(Bytes::header(3, 0, 1).u64(0).raw(&[0; 32]), "an empty metadata key");
    fails(Bytes::header(3, 0, 1).u64(1).raw(&[0xff; 20]), "metadata key at offset 24 is not UTF-8");
    fails(with_key(|b| b.u32(13).raw(&[0; 8])), "key k: unknown value type 13");
    fails(with_key(|b| b.u32(7).raw(&[2])), "key k: a boolean is 0 or 1, found 2");
    fails(with_key(|b| b.u32(10).raw(&[0; 7])), "truncated: k at offset 37 needs 8 bytes, 7 are left");
    fails(with_key(|b| b.u32(8).u64(limits::STRING_BYTES_MAX + 1)), "k of 16777217 bytes at offset 37");
    fails(with_key(|b| b.u32(8).u64(9).raw(b"12345678")), "truncated: k");
    fails(with_key(|b| b.u32(8).u64(1).raw(&[0xc3])), "k at offset 37 is not UTF-8");
    let twice = Bytes::header(3, 0, 2).string("k").u32(0).raw(&[1]).string("k").u32(0).raw(&[1]);
    fails(twice, "key k occurs twice");
}

#[test]
fn arrays() {
    let array = |element: u32, count: u64, rest: &[u8]| with_key(|b| b.u32(9).u32(element).u64(count).raw(rest));
    fails(array(4, limits::ARRAY_LEN_MAX + 1, &[]), "16777217 k: more than the limit");
    fails(array(4, 3, &[0; 11]), "truncated: k at offset 49 needs 12 bytes, 11 are left");
    fails(array(8, 1 << 20, &[0; 64]), "truncated: k");
    fails(array(8, 1, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), "is not UTF-8");
    fails(array(9, 1, &[0; 12]), "key k: an array of arrays");
    fails(array(99, 1, &[0; 8]), "key k: unknown value type 99");
    fails(array(7, 2, &[1, 3]), "key k: a boolean is 0 or 1, found 3");
}

#[test]
fn a_header_beyond_its_limit() {
    // A sparse claim: the reader promises 1 TiB, so only the limit can stop a directory of that size.
    let bytes = Bytes::header(3, 0, 1).string("k").u32(9).u32(10).u64(limits::ARRAY_LEN_MAX);
    let endless = std::io::Read::chain(bytes.0.as_slice(), std::io::repeat(0));
    let one = parse(endless, 1 << 40).expect("16 Mi values are within the limits");
    assert_eq!(one.metadata().u64_array("k").unwrap().len() as u64, limits::ARRAY_LEN_MAX);
    let mut three = Bytes::header(3, 0, 3);
    for key in ["a", "b", "c"] {
        three = three.string(key).u32(9).u32(10).u64(limits::ARRAY_LEN_MAX);
        three.0.resize(three.0.len() + (limits::ARRAY_LEN_MAX * 8) as usize, 0);
    }
    fails(three, "header larger than 268435456 bytes");
}

#[test]
fn a_reader_that_ends_early() {
    let bytes = Bytes::header(3, 0, 1).string("k").u32(9).u32(4).u64(1 << 20);
    let error = parse(bytes.0.as_slice(), u64::MAX / 2).unwrap_err();
    assert!(matches!(error, GgufError::Truncated { left: 0, .. }), "{error}");
}

#[test]
fn alignment() {
    let aligned = |ty: u32, value: &[u8]| Bytes::header(3, 0, 1).string("general.alignment").u32(ty).raw(value);
    for bad in [0u32, 3, 48, limits::ALIGNMENT_MAX * 2] {
        fails(aligned(4, &bad.to_le_bytes()), &format!("general.alignment is {bad}: it must be a power of two"));
    }
    fails(aligned(6, &1f32.to_le_bytes()), "general.alignment is f32");
    assert_eq!(aligned(4, &64u32.to_le_bytes()).parse().unwrap().alignment(), 64);
}

#[test]
fn tensors() {
    assert!(with_tensor(&[8], 0, 0, 32).parse().is_ok());
    fails(with_tensor(&[], 0, 0, 0), "tensor t: 0 dimensions");
    fails(with_tensor(&[1; 5], 0, 0, 64), "tensor t: 5 dimensions");
    fails(with_tensor(&[8, 0], 0, 0, 64), "tensor t: dimension 1 is zero");
    fails(with_tensor(&[1 << 33, 1 << 33], 0, 0, 64), "tensor t: dimensions [8589934592, 8589934592] overflow");
    fails(with_tensor(&[u64::MAX], 0, 0, 64), "overflow");
    fails(with_tensor(&[8], 777, 0, 64), "tensor t: type 777 is not supported");
    fails(with_tensor(&[8], 13, 0, 64), "tensor t: type 13 (Q5_K) is not supported");
    fails(with_tensor(&[128], 12, 0, 512), "rows of 128 values are not whole blocks of Q4_K (256 values)");
    fails(with_tensor(&[8], 0, 8, 64), "tensor t: offset 8 is not a multiple of the alignment 32");
    fails(with_tensor(&[8], 0, 0, 31), "tensor t: 32 bytes at offset 64 end past the end of the file (95 bytes)");
    fails(with_tensor(&[8], 0, 64, 64), "past the end of the file");
    fails(with_tensor(&[8], 0, u64::MAX - 31, 64), "past the end of the file");
    fails(Bytes::header(3, 1, 0).u64(1000).raw(&[b'n'; 2000]), "tensor name of 1000 bytes");
    fails(Bytes::header(3, 1, 0).u64(0).raw(&[0; 64]), "an empty tensor name");
}

#[test]
fn tensors_among_each_other() {
    let pair = |second: &str, offset: u64| {
        Bytes::header(3, 2, 0).tensor("a", &[16], 0, 0).tensor(second, &[8], 0, offset).data(96)
    };
    assert!(pair("b", 64).parse().is_ok());
    fails(pair("a", 64), "tensor a occurs twice");
    fails(pair("b", 32), "tensors a and b overlap");
    fails(pair("b", 0), "overlap");
}

#[test]
fn errors_of_a_file_name_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let error = GgufFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("x.gguf: cannot open"), "{error}");
    std::fs::write(&path, b"GGU").unwrap();
    let error = GgufFile::open(&path).unwrap_err();
    assert!(error.to_string().contains("x.gguf: truncated: the magic"), "{error}");
    assert!(matches!(error.root(), GgufError::Truncated { .. }));
    let error = GgufFile::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("cannot read the header"), "{error}");
}
