//! N-gram memory: hash vectors at real table sizes, row decoding, damaged rows, failing reads and recovery.
//! Never lets a failed step leave a trace: what follows must equal a run without the failure, bit for bit.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::checkpoint::{Checkpoint, fixture};
use common::golden::Golden;
use common::memory_supply::MemoryExperts;
use common::setup::{run, setup, shared};
use ds4::backend::cpu::CpuBackend;
use ds4::backend::cpu::matmul::Arithmetic;
use ds4::backend::cpu::simd::SimdLevel;
use ds4::models::deepseek41::{Config, DeepSeek41, EngramConfig};
use ds4::models::supply::{RowSupply, RowTicket, SupplyError};
use ds4::models::{Model, ModelError, RunnerOptions, Want};
use serde_json::Value;

fn integers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect()
}

/// Hash constants alone, with the identity as token map.
fn constants(primes: Vec<Vec<u64>>, multipliers: Vec<Vec<u64>>, vocab: u32, pad: u32) -> EngramConfig {
    let order_max = multipliers[0].len();
    let starts = |p: &Vec<u64>| p.iter().scan(0, |next, p| Some(std::mem::replace(next, *next + p))).collect();
    EngramConfig {
        layers: (0..primes.len()).collect(),
        rows: primes.iter().map(|p| p.iter().sum()).collect(),
        order_max,
        heads: primes[0].len() / (order_max - 1),
        width: 256,
        row_bytes: 264,
        token_map: (0..vocab).collect(),
        pad,
        offsets: primes.iter().map(starts).collect(),
        primes,
        multipliers,
    }
}

/// The constants of the published model (spec 4.2).
fn published() -> EngramConfig {
    let prime = |d: &u64| 16_000_000 + d;
    let first = [
        57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409, 447,
        463,
    ];
    let second = [
        477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769, 781, 799, 813, 819, 841, 877,
        879, 889,
    ];
    let multipliers = vec![
        vec![76632096046245, 4839876093313, 35959672319349, 73987337458391],
        vec![67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ];
    let primes = vec![first.iter().map(prime).collect(), second.iter().map(prime).collect()];
    constants(primes, multipliers, 99092, 2)
}

/// Spec appendix: first and last windows, all columns of both layers.
#[test]
fn rows_of_the_published_model() {
    let engram = published();
    assert_eq!(engram.rows, [384_006_168, 384_016_682]);
    let rows = engram.rows(&[], &[5, 17, 99091, 2, 40000]);
    let first = [
        5412672, 18319159, 35492627, 60880252, 74962984, 95657733, 98005115, 127351390, 143494632, 151789366,
        171410756, 185435171, 207165545, 218031260, 226330336, 247008214, 256353435, 276423911, 295874085, 305599364,
        322749888, 348475788, 367405771, 372009279,
    ];
    assert_eq!(rows[0][..24], first);
    let second = [
        6939818, 27264717, 45254833, 51915000, 79245924, 86868470, 108849060, 119840903, 131576092, 148509516,
        175704205, 177570039, 200101533, 208499118, 238497982, 243164617, 268363546, 274011563, 290850399, 314068096,
        324530373, 351836884, 354242998, 382274687,
    ];
    assert_eq!(rows[1][..24], second);
    let second_last = [
        3960641, 18934143, 36495512, 55229479, 73104584, 81453905, 96789907, 114742028, 128332280, 159292871,
        165451944, 180287531, 193279467, 223856180, 227590835, 246533479, 257700134, 281210574, 292509375, 307004566,
        320100307, 340213032, 356765043, 376031112,
    ];
    assert_eq!(rows[1][96..], second_last);
    // Cut anywhere: the tail is all that is needed.
    for cut in 0..=5 {
        let tokens = [5, 17, 99091, 2, 40000];
        let (before, after) = tokens.split_at(cut);
        for (table, whole) in rows.iter().enumerate() {
            let parts = [engram.rows(&[], before)[table].clone(), engram.rows(before, after)[table].clone()].concat();
            assert_eq!(parts, *whole, "cut at {cut}");
        }
    }
}

/// Golden vectors for other sizes; skipped with a notice where the shared folder is absent.
#[test]
fn rows_of_the_golden_hash_file() {
    let Some(path) = shared("golden/hash/ngram.json") else { return };
    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut compared = 0;
    for (name, case) in file.as_object().unwrap().iter().filter(|(name, _)| name.starts_with("engram")) {
        let per_layer = |key: &str| -> Vec<Vec<u64>> {
            let layers = case[key].as_array().unwrap().iter();
            layers
                .map(|l| {
                    if l[0].is_array() {
                        l.as_array().unwrap().iter().flat_map(integers).collect()
                    } else {
                        integers(l)
                    }
                })
                .collect()
        };
        let vocab = case["compressed_vocab_size"].as_u64().unwrap() as u32;
        let pad = case["pad_compressed_id"].as_u64().unwrap() as u32;
        let engram = constants(per_layer("primes"), per_layer("multipliers"), vocab, pad);
        let tokens: Vec<u32> = integers(&case["compressed_token_ids"]).iter().map(|t| *t as u32).collect();
        let rows = engram.rows(&[], &tokens);
        for (at, token) in case["row_ids[token][layer][column]"].as_array().unwrap().iter().enumerate() {
            for (table, want) in token.as_array().unwrap().iter().enumerate() {
                let columns = engram.columns();
                assert_eq!(rows[table][at * columns..][..columns], integers(want), "{name}, token {at}, table {table}");
                compared += 1;
            }
        }
    }
    assert!(compared > 0);
}

/// Spec appendix, row decoding.
#[test]
fn row_values() {
    let mut engram = published();
    (engram.width, engram.row_bytes) = (32, 33);
    let decode = |code: u8, scale: u8| {
        let mut row = vec![code; 33];
        row[32] = scale;
        let mut out = [0.0; 32];
        engram.decode(&row, &mut out).map(|()| out[31])
    };
    for (code, scale, want) in
        [(0x38, 127, 1.0f32), (0x7e, 120, 3.5), (0x01, 127, 0.001953125), (0x80, 127, -0.0), (0x38, 0, 2f32.powi(-127))]
    {
        assert_eq!(decode(code, scale).unwrap().to_bits(), want.to_bits(), "{code:#x} {scale}");
    }
    for (code, scale) in [(0x7f, 127), (0xff, 127), (0x38, 255), (0x00, 255), (0x7e, 254)] {
        decode(code, scale).unwrap_err();
    }
}

/// A failing expert read, then a failing row read: the step fails, the state stays, the rest equals an undisturbed run.
#[test]
fn a_failed_step_leaves_no_trace() {
    let golden = Golden::open(&fixture("b").join("golden.safetensors"));
    let tokens = &golden.tokens()[..90];
    let options = RunnerOptions::new(100, 32);
    let undisturbed = run(&mut *setup(&fixture("b"), 1, options, 8).runner, tokens, &[31, 1, 58], None);

    let mut setup = setup(&fixture("b"), 1, options, 8);
    let mut logits = run(&mut *setup.runner, &tokens[..31], &[31], None);
    for failing in 0..5 {
        setup.experts.fail_after.store(failing, Ordering::Relaxed);
        let error =
            setup.runner.forward(&tokens[31..40], Want::All, &mut |_, _| panic!("no logits"), None).unwrap_err();
        assert!(error.to_string().contains(&format!("layer {failing}")), "{error}");
        assert_eq!(setup.runner.len(), 31);
    }
    setup.experts.fail_after.store(-1, Ordering::Relaxed);
    logits.extend(run(&mut *setup.runner, &tokens[31..], &[1, 58], None));
    assert!(logits.iter().zip(&undisturbed).all(|(a, b)| a.to_bits() == b.to_bits()));

    // Two chunks, of which the second fails: the first stays.
    setup.runner.reset();
    let before = setup.experts.requests.load(Ordering::Relaxed);
    setup.runner.forward(&tokens[..32], Want::None, &mut |_, _| (), None).unwrap();
    let of_the_first = setup.experts.requests.load(Ordering::Relaxed) - before;
    setup.runner.reset();
    setup.experts.fail_after.store(of_the_first as i64 + 2, Ordering::Relaxed);
    setup.runner.forward(&tokens[..50], Want::None, &mut |_, _| (), None).unwrap_err();
    assert_eq!(setup.runner.len(), 32);
    setup.experts.fail_after.store(-1, Ordering::Relaxed);
    let rest = run(&mut *setup.runner, &tokens[32..], &[58], None);
    let same = rest.iter().zip(&undisturbed[32 * setup.config.vocab..]).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same, "after a failed second chunk");

    setup.runner.forward(&[640], Want::None, &mut |_, _| (), None).unwrap_err();
    let error = setup.runner.forward(&[0; 11], Want::None, &mut |_, _| (), None).unwrap_err();
    assert!(matches!(error, ModelError::Context { len: 90, more: 11, ctx: 100 }), "{error}");
    assert_eq!(setup.runner.len(), 90);
}

/// Rows under way are used once, whether they were asked for early or not.
#[test]
fn rows_are_submitted_once_a_chunk() {
    let golden = Golden::open(&fixture("b").join("golden.safetensors"));
    let tokens = golden.tokens();
    let options = RunnerOptions::new(100, 16);
    let mut setup = setup(&fixture("b"), 1, options, 8);
    let rows = setup.rows.clone().unwrap();
    run(&mut *setup.runner, &tokens[..40], &[40], None);
    assert_eq!(rows.submissions.load(Ordering::Relaxed), 3, "40 tokens are chunks of 16, 16 and 8");
    setup.runner.prefetch_rows(&tokens[40..41]).unwrap();
    run(&mut *setup.runner, &tokens[40..41], &[1], None);
    assert_eq!(rows.submissions.load(Ordering::Relaxed), 4, "the rows asked for early are used");
    setup.runner.prefetch_rows(&tokens[50..51]).unwrap();
    run(&mut *setup.runner, &tokens[41..42], &[1], None);
    assert_eq!(rows.submissions.load(Ordering::Relaxed), 6, "rows of another token are not");
}

/// Delivers rows with one code replaced by a NaN.
struct Damaged(common::memory_supply::MemoryRows);

struct DamagedTicket(Box<dyn RowTicket>);

impl RowSupply for Damaged {
    fn row_bytes(&self) -> usize {
        self.0.row_bytes()
    }

    fn submit(&self, rows_by_table: &[Vec<u64>]) -> Result<Box<dyn RowTicket>, SupplyError> {
        Ok(Box::new(DamagedTicket(self.0.submit(rows_by_table)?)))
    }
}

impl RowTicket for DamagedTicket {
    fn wait(&mut self, table: usize, out: &mut [u8]) -> Result<(), SupplyError> {
        self.0.wait(table, out)?;
        if table == 1 {
            out[5 * 33 + 3] = 0x7f;
        }
        Ok(())
    }
}

#[test]
fn a_damaged_row_is_named() {
    let checkpoint = Checkpoint::open(&fixture("b"));
    let backend = Arc::new(CpuBackend::new(1, Arithmetic::Quality, SimdLevel::Scalar).unwrap());
    let config = Config::from_metadata(&checkpoint).unwrap();
    let engram = config.engram.clone().unwrap();
    let model = Arc::new(DeepSeek41::load(&checkpoint, backend.clone(), &checkpoint).unwrap());
    let experts = Arc::new(MemoryExperts::new(backend, &checkpoint, (config.layers.len(), config.experts), 8));
    let rows = Damaged(common::memory_supply::MemoryRows::new(&checkpoint, &engram.layers));
    let options = RunnerOptions::new(8, 4);
    let mut runner = model.runner(options, experts, Some(Arc::new(rows))).unwrap();
    let error = runner.forward(&[7, 8], Want::Last, &mut |_, _| (), None).unwrap_err();
    let damaged = engram.rows(&[], &[7, 8])[1][5];
    assert!(matches!(error, ModelError::RowData { layer: 3, row, .. } if row == damaged), "{error}");
    assert_eq!(runner.len(), 0);
}
