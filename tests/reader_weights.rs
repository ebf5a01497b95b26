//! Loading of resident tensors: bytes, alignment, progress, and every way the file can disappoint.
//! Owns files in a temporary directory; reads nothing of the real models.
//! Surprising fact: a directory entry beyond the end is refused before memory is taken for it.

use std::path::PathBuf;
use std::sync::Mutex;

use ds4::storage::layout::Extent;
use ds4::storage::weights::{LoadOptions, ResidentWeights, TENSOR_ALIGN, TensorExtent, WeightsError};

fn image() -> Vec<u8> {
    (0..(9u64 << 20) + 77).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

fn file() -> (PathBuf, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, image()).unwrap();
    (path, dir)
}

fn tensor(name: &str, offset: u64, len: u64) -> TensorExtent {
    TensorExtent { name: name.into(), extent: Extent { offset, len } }
}

fn load(path: &std::path::Path, tensors: &[TensorExtent]) -> Result<ResidentWeights, WeightsError> {
    ResidentWeights::load(path, tensors, &LoadOptions::default(), &|_, _| ())
}

#[test]
fn tensors_load_whole_and_aligned() {
    let (path, _dir) = file();
    let image = image();
    let end = image.len() as u64;
    let tensors = [
        tensor("late", end - 5, 5),
        tensor("big", 33, 9 << 20),
        tensor("none", 100, 0),
        tensor("one", 4095, 1),
        tensor("same bytes", 33, 1000),
    ];
    for threads in [1, 2, 16] {
        for drop_page_cache in [false, true] {
            let seen = Mutex::new(Vec::new());
            let options = LoadOptions { threads, drop_page_cache };
            let progress = |done, total| seen.lock().unwrap().push((done, total));
            let weights = ResidentWeights::load(&path, &tensors, &options, &progress).unwrap();
            for (index, t) in tensors.iter().enumerate() {
                let bytes = weights.get(&t.name).unwrap();
                let Extent { offset, len } = t.extent;
                assert!(bytes == &image[offset as usize..(offset + len) as usize], "{}", t.name);
                assert!(bytes.as_ptr().addr().is_multiple_of(TENSOR_ALIGN), "{}", t.name);
                assert!(std::ptr::eq(bytes, weights.tensor(index)));
            }
            let total = (9 << 20) + 1006;
            assert!(weights.get("other").is_none());
            assert!((total..total + 5 * TENSOR_ALIGN as u64).contains(&weights.memory().0));
            let seen = seen.into_inner().unwrap();
            assert_eq!((seen[0], *seen.last().unwrap()), ((0, total), (total, total)));
            assert!(seen.len() > 3 && seen.iter().filter(|s| s.0 == total).count() == 1, "{seen:?}");
        }
    }
    assert_eq!(load(&path, &[]).unwrap().tensors(), 0);
}

#[test]
fn extents_beyond_the_file_are_refused_by_name() {
    let (path, _dir) = file();
    let end = image().len() as u64;
    for (offset, len) in [(end, 1), (end - 3, 4), (u64::MAX - 1, 10), (0, u64::MAX), (1 << 60, 1 << 60)] {
        let error = load(&path, &[tensor("fine", 0, 10), tensor("blk.0.attn_q.weight", offset, len)]).err().unwrap();
        assert!(matches!(error, WeightsError::EndOfFile { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("blk.0.attn_q.weight") && text.contains("model.gguf"), "{text}");
    }
}

#[test]
fn more_than_memory_can_address_is_refused() {
    // A sparse file makes the extents true; their sum is what cannot be.
    let (path, _dir) = file();
    let sparse = 1u64 << 43;
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(sparse).unwrap();
    let tensors: Vec<_> = (0..1 << 21).map(|i| tensor(&i.to_string(), 0, sparse)).collect();
    assert!(matches!(load(&path, &tensors).err(), Some(WeightsError::TooLarge { .. })));
    let tensors: Vec<_> = (0..1 << 12).map(|i| tensor(&i.to_string(), 0, sparse)).collect();
    let error = load(&path, &tensors).err().unwrap();
    assert!(matches!(error, WeightsError::Memory { .. }), "{error}");
    assert!(error.to_string().contains("GiB"), "{error}");
}

#[test]
fn a_file_that_changes_while_it_loads_is_an_error() {
    let (path, _dir) = file();
    let shorten = |done, total| {
        if done == 0 && total > 0 {
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        }
    };
    let tensors = [tensor("head", 0, 1000), tensor("tail", 8 << 20, 1 << 20)];
    let error = ResidentWeights::load(&path, &tensors, &LoadOptions::default(), &shorten).err().unwrap();
    assert!(matches!(&error, WeightsError::EndOfFile { tensor, .. } if tensor == "tail"), "{error}");

    std::fs::write(&path, image()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let touch = |done, _| {
        if done == 0 {
            let mut bytes = image();
            bytes[0] ^= 1;
            std::fs::write(&path, bytes).unwrap();
        }
    };
    let error = ResidentWeights::load(&path, &tensors, &LoadOptions::default(), &touch).err().unwrap();
    assert!(error.to_string().contains("written to"), "{error}");
}

#[test]
fn unreadable_files_are_named() {
    let error = load(std::path::Path::new("/no/such/model.gguf"), &[]).err().unwrap();
    assert!(error.to_string().contains("/no/such/model.gguf"), "{error}");
    let error = load(std::path::Path::new("/proc/self/mem"), &[tensor("t", 0, 1)]).err().unwrap();
    assert!(error.to_string().contains("tensor t"), "{error}");
}
