//! Row tables over every reader: order, repeats, windows, failures, overlap. Owns a small image with two tables.
//! Surprising fact: the tables start and end at odd bytes and touch, as in the real files.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4::storage::layout::TableLayout;
use ds4::storage::reader::fake::{FakeFault, FakeOptions, FakeReader};
use ds4::storage::reader::*;
use ds4::storage::row_table::{RowError, RowTables, WINDOW_BLOCKS};
use ds4::units::LayerIdx;

const ROW: usize = 264;
const ROWS: [u64; 2] = [9000, 7001];
const START: u64 = 1608;

fn tables() -> [TableLayout; 2] {
    let first = TableLayout { layer: LayerIdx(1), offset: START, row_bytes: ROW as u32, rows: ROWS[0] };
    [first, TableLayout { layer: LayerIdx(14), offset: START + ROWS[0] * ROW as u64, rows: ROWS[1], ..first }]
}

/// Ends with the last row of the last table.
fn image() -> Vec<u8> {
    let bytes = START + (ROWS[0] + ROWS[1]) * ROW as u64;
    (0..bytes).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1).collect()
}

fn expected(table: usize, row: u64) -> Vec<u8> {
    let at = (tables()[table].offset + row * ROW as u64) as usize;
    image()[at..at + ROW].to_vec()
}

fn random_rows(seed: u64, table: usize, count: usize) -> Vec<u64> {
    let mut z = seed;
    let mut next = || {
        z = z.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (z >> 33) % ROWS[table]
    };
    (0..count).map(|_| next()).collect()
}

fn fake(options: FakeOptions) -> Arc<FakeReader> {
    FakeReader::new(image(), options)
}

fn rough() -> FakeOptions {
    FakeOptions { jitter: Duration::from_micros(200), short_of_256: 60, ..FakeOptions::default() }
}

type Named = (String, Arc<dyn Reader>);

fn readers() -> (Vec<Named>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, image()).unwrap();
    let buffered = FakeOptions { alignment: Alignment::NONE, ..FakeOptions::default() };
    let page = FakeOptions { alignment: Alignment { offset: 4096, memory: 4096 }, ..rough() };
    let mut all: Vec<Named> = vec![
        ("fake".into(), fake(rough())),
        ("fake buffered".into(), fake(buffered)),
        ("fake 4096".into(), fake(page)),
    ];
    for io in [ReaderChoice::Auto, ReaderChoice::Pread] {
        for direct in [DirectChoice::Auto, DirectChoice::Off] {
            let options = ReaderOptions { io, direct, ..ReaderOptions::default() };
            all.push((format!("{io:?} direct {direct:?}"), open_reader(&path, &options).unwrap()));
        }
    }
    (all, dir)
}

fn assert_rows(name: &str, table: usize, asked: &[u64], out: &[u8]) {
    let image = image();
    for (i, (&row, got)) in asked.iter().zip(out.chunks_exact(ROW)).enumerate() {
        let at = (tables()[table].offset + row * ROW as u64) as usize;
        assert!(got == &image[at..at + ROW], "{name}: table {table}, row {row}, asked as number {i}");
    }
}

#[test]
fn rows_come_in_the_order_asked_with_repeats() {
    let (readers, _dir) = readers();
    for (name, reader) in readers {
        let rows = RowTables::new(reader.clone(), &tables(), WINDOW_BLOCKS).unwrap();
        let asked = [vec![5, 0, ROWS[0] - 1, 5, 4, 5, 6, 1, 0], vec![ROWS[1] - 1, 3, 3, 0]];
        let mut ticket = rows.submit(&asked).unwrap();
        for table in [1, 0, 1] {
            let mut out = vec![0; asked[table].len() * ROW];
            ticket.wait(table, &mut out).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_rows(&name, table, &asked[table], &out);
        }
        let c = rows.counters().snapshot();
        assert_eq!((c.submissions, c.rows_asked, c.rows_read, c.row_bytes), (1, 13, 9, 9 * ROW as u64), "{name}");
        assert_eq!(reader.counters().submissions.get(), 1, "{name}: one submission for all tables");
    }
}

#[test]
fn empty_batches_and_tables_are_ready_at_once() {
    let rows = RowTables::new(fake(rough()), &tables(), WINDOW_BLOCKS).unwrap();
    let mut ticket = rows.submit(&[vec![], vec![1]]).unwrap();
    assert!(ticket.is_ready(0));
    ticket.wait(0, &mut []).unwrap();
    let mut out = [0; ROW];
    ticket.wait(1, &mut out).unwrap();
    assert_eq!(out.as_slice(), expected(1, 1));
    let none = RowTables::new(fake(rough()), &[], WINDOW_BLOCKS).unwrap();
    drop(none.submit(&[]).unwrap());
}

#[test]
fn a_prefill_batch_runs_through_a_small_window() {
    let (readers, _dir) = readers();
    for (name, reader) in readers {
        let asked = [random_rows(1, 0, 512 * 24), random_rows(2, 1, 512 * 24)];
        let rows = RowTables::new(reader.clone(), &tables(), 50).unwrap();
        let block = reader.alignment().region_bytes_max(ROW as u64).unwrap() as u64;
        let plan = rows.batch_bytes_max(2 * 512 * 24);
        assert!(plan >= 2 * 512 * 24 * ROW as u64 + 50 * block && plan < 2 * 512 * 24 * 350 + 51 * block, "{plan}");
        let mut ticket = rows.submit(&asked).unwrap();
        for (table, asked) in asked.iter().enumerate() {
            let mut out = vec![0; asked.len() * ROW];
            ticket.wait(table, &mut out).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_rows(&name, table, asked, &out);
        }
        let c = rows.counters().snapshot();
        assert!(c.rows_read < c.rows_asked && c.row_reads <= c.rows_read, "{name}: {c:?}");
        assert_eq!(reader.counters().reads.get(), c.row_reads, "{name}");
        assert_eq!(reader.counters().submissions.get(), 1, "{name}");
    }
}

#[test]
fn a_large_batch_goes_on_without_a_waiter() {
    let reader = fake(FakeOptions::default());
    let rows = RowTables::new(reader.clone(), &tables(), 16).unwrap();
    let asked = [random_rows(3, 0, 2000), random_rows(4, 1, 2000)];
    let ticket = rows.submit(&asked).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while !(ticket.is_ready(0) && ticket.is_ready(1)) {
        assert!(Instant::now() < until, "the batch stands still");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_decode_step_costs_one_delay_not_forty_eight() {
    let delay = Duration::from_millis(2);
    let reader = fake(FakeOptions { delay, ..FakeOptions::default() });
    let rows = RowTables::new(reader, &tables(), WINDOW_BLOCKS).unwrap();
    // The best of many steps, since other tests take the processors away: at least twenty, and on until one was quick.
    let (limit, patience) = (delay * 48 / 10, Instant::now() + Duration::from_secs(30));
    let (mut best, mut step) = (Duration::MAX, 0);
    while step < 20 || (best >= limit && Instant::now() < patience) {
        let asked = [random_rows(step, 0, 24), random_rows(step + 100, 1, 24)];
        let begun = Instant::now();
        let mut ticket = rows.submit(&asked).unwrap();
        let mut out = vec![0; 24 * ROW];
        for (table, asked) in asked.iter().enumerate() {
            ticket.wait(table, &mut out).unwrap();
            assert_rows("decode", table, asked, &out);
        }
        best = best.min(begun.elapsed());
        step += 1;
    }
    assert!(best >= delay && best < limit, "48 rows took {best:?}");
    let c = rows.counters().snapshot();
    assert_eq!(c.submissions, step);
    assert!(c.wait_ms >= 40.0, "{c:?}");
}

#[test]
fn a_row_out_of_range_is_refused_before_anything_is_read() {
    let reader = fake(FakeOptions::default());
    let rows = RowTables::new(reader.clone(), &tables(), WINDOW_BLOCKS).unwrap();
    let error = rows.submit(&[vec![1], vec![0, ROWS[1]]]).err().expect("refused");
    assert!(matches!(error, RowError::OutOfRange { layer: LayerIdx(14), row, .. } if row == ROWS[1]), "{error}");
    assert!(error.to_string().contains("7001") && error.to_string().contains("layer 14"), "{error}");
    assert_eq!((reader.reads_begun(), rows.counters().submissions.get()), (0, 0));
}

#[test]
fn tables_that_overflow_are_refused() {
    let [first, _] = tables();
    for bad in [
        TableLayout { rows: u64::MAX, ..first },
        TableLayout { offset: u64::MAX - 5, ..first },
        TableLayout { row_bytes: 0, ..first },
    ] {
        let result = RowTables::new(fake(FakeOptions::default()), &[first, bad], WINDOW_BLOCKS);
        assert!(matches!(result.err(), Some(RowError::Layout { .. })));
    }
}

#[test]
fn a_failed_row_fails_the_step_by_name_and_the_next_step_works() {
    for window in [WINDOW_BLOCKS, 3] {
        let reader = fake(FakeOptions::default());
        let rows = RowTables::new(reader.clone(), &tables(), window).unwrap();
        let offset = tables()[1].offset + 4000 * ROW as u64;
        let fault = FakeFault { offset: offset + 5, errno: libc::EIO, times: 1 };
        let mut asked = [random_rows(5, 0, 300), vec![10, 4000, 20, 6000]];
        asked[0].sort_unstable();
        for round in 0..3 {
            if round == 1 {
                reader.add_fault(fault);
            }
            let mut ticket = rows.submit(&asked).unwrap();
            let mut out = vec![0x77; asked[1].len() * ROW];
            let result = ticket.wait(1, &mut out);
            if round != 1 {
                result.unwrap();
                assert_rows("without fault", 1, &asked[1], &out);
                continue;
            }
            let text = result.unwrap_err().to_string();
            for part in ["row 4000 of the table of layer 14", "fake.gguf", &offset.to_string(), "nput/output error"] {
                assert!(text.contains(part), "'{part}' missing in: {text}");
            }
            assert!(out.iter().all(|&b| b == 0x77), "nothing is written for a failed step");
            assert!(ticket.wait(1, &mut out).is_err(), "and it stays failed");
        }
        assert_eq!(rows.counters().failed.get(), 2);
    }
}

#[test]
fn a_table_that_is_in_serves_although_another_failed() {
    let reader = fake(FakeOptions::default());
    let rows = RowTables::new(reader.clone(), &tables(), WINDOW_BLOCKS).unwrap();
    reader.add_fault(FakeFault { offset: tables()[1].offset + 264_000, errno: libc::EIO, times: u32::MAX });
    let mut ticket = rows.submit(&[vec![9], vec![1000]]).unwrap();
    let mut out = [0; ROW];
    assert!(ticket.wait(1, &mut out).is_err());
    std::thread::sleep(Duration::from_millis(50));
    ticket.wait(0, &mut out).unwrap();
    assert_eq!(out.as_slice(), expected(0, 9));
}

#[test]
fn a_shortened_file_is_never_read_as_zeros() {
    let reader = fake(FakeOptions::default());
    let rows = RowTables::new(reader.clone(), &tables(), WINDOW_BLOCKS).unwrap();
    reader.truncate(tables()[1].offset + 100);
    let mut out = [0; ROW];
    let mut ticket = rows.submit(&[vec![ROWS[0] - 1], vec![0]]).unwrap();
    let text = ticket.wait(1, &mut out).unwrap_err().to_string();
    assert!(text.contains("row 0 of the table of layer 14") && text.contains("shortened"), "{text}");
}

#[test]
fn tickets_dropped_early_leave_nothing_behind() {
    let (readers, _dir) = readers();
    for (name, reader) in readers {
        let rows = RowTables::new(reader.clone(), &tables(), 64).unwrap();
        for step in 0..60 {
            let asked = [random_rows(step, 0, 200), random_rows(step, 1, 200)];
            let mut ticket = rows.submit(&asked).unwrap();
            if step % 3 == 0 {
                let mut out = vec![0; 200 * ROW];
                ticket.wait(0, &mut out).unwrap();
                assert_rows(&name, 0, &asked[0], &out);
            }
        }
        let asked = [vec![8], vec![8]];
        let mut ticket = rows.submit(&asked).unwrap();
        let mut out = [0; ROW];
        ticket.wait(1, &mut out).unwrap();
        assert_eq!(out.as_slice(), expected(1, 8), "{name}");
    }
}

#[test]
fn batches_overlap() {
    let reader = fake(rough());
    let rows = RowTables::new(reader, &tables(), 32).unwrap();
    let asked: Vec<[Vec<u64>; 2]> = (0..4).map(|s| [random_rows(s, 0, 500), random_rows(s + 9, 1, 100)]).collect();
    let mut tickets: Vec<_> = asked.iter().map(|a| rows.submit(a).unwrap()).collect();
    for (ticket, asked) in tickets.iter_mut().zip(&asked).rev() {
        for (table, asked) in asked.iter().enumerate() {
            let mut out = vec![0; asked.len() * ROW];
            ticket.wait(table, &mut out).unwrap();
            assert_rows("overlap", table, asked, &out);
        }
    }
}
