//! Q8_0 and MXFP4 weights on tiles: 64 weight rows by 16 activation rows, a block of 32 values at a time.
//! Never holds more than a panel of weight rows, which stays in a second-level cache while up to 256 activation rows pass over it.
//! Surprising fact: blocks lie in the order of the running sums they belong to, so that one sum after the other is finished.

use super::*;
use crate::quant::mxfp4;
use std::cell::RefCell;

/// Running sums of a row.
const OCTET: usize = 8;
/// Weight rows of a panel.
const PANEL_ROWS: usize = PLANES * SIDE;
/// Lines of a tile of activations: four codes of each row a line.
const DEPTH: usize = 8;

/// Activation rows, 16 to a tile.
#[derive(Default)]
struct Columns {
    /// `[tile][slots][8]`: line `i` holds codes `4 i ..` of a block of each of 16 rows.
    codes: Vec<[Line; DEPTH]>,
    /// `[tile][slots]`: scales, F32.
    scales: Vec<Line>,
}

/// 64 weight rows.
#[derive(Default)]
struct Panel {
    /// `[slots][plane][16 rows]`: the 32 codes of a block.
    codes: Vec<[[[i8; 32]; SIDE]; PLANES]>,
    /// `[slots][rows]`: factors.
    factors: Vec<[f32; PANEL_ROWS]>,
}

#[derive(Default)]
struct Scratch {
    columns: Columns,
    panel: Panel,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Bytes that a thread keeps to multiply `tiles` of 16 activation rows of `cols` columns.
pub(super) fn scratch_bytes(cols: usize, tiles: usize) -> u64 {
    let slots = Slots::of(cols / 32).len();
    (slots * (tiles * (DEPTH + 1) * size_of::<Line>() + PANEL_ROWS * (32 + size_of::<f32>()))) as u64
}

/// Where blocks lie: those of running sum 0, then those of 1, and so on, as much room for each.
#[derive(Clone, Copy)]
struct Slots {
    blocks: usize,
    turns: usize,
}

impl Slots {
    fn of(blocks: usize) -> Self {
        Slots { blocks, turns: blocks.div_ceil(OCTET) }
    }

    fn len(self) -> usize {
        OCTET * self.turns
    }

    #[inline(always)]
    fn of_block(self, b: usize) -> usize {
        b % OCTET * self.turns + b / OCTET
    }

    /// The slots of sum `s` that hold blocks.
    fn of_sum(self, s: usize) -> Range<usize> {
        let count = (self.blocks + OCTET - 1).saturating_sub(s) / OCTET;
        s * self.turns..s * self.turns + count
    }
}

/// `out[o][a]` = weight row `o` times activation row `x(a)`, for all `a` below `count`. Only where tiles are available.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(in super::super) fn product<'a>(
    (ty, bytes, row_bytes): (QuantType, &[u8], usize),
    (x, count): (&dyn Fn(usize) -> &'a [Step32], usize),
    out: &mut [f32],
) {
    assert_eq!(out.len(), bytes.len() / row_bytes * count, "output of {} x {count}", bytes.len() / row_bytes);
    let slots = Slots::of(row_bytes / ty.block_bytes());
    SCRATCH.with_borrow_mut(|Scratch { columns, panel }| {
        // Sums, weights of half a step, and activations of half a step.
        let (sum, weights, activations) = ((64, 16), (32, 16), (64, DEPTH as u8));
        let tiles = Tiles(Configured::new([sum, sum, sum, sum, activations, weights, weights, weights]));
        for first in (0..count).step_by(ROWS_TOGETHER) {
            let place = Place { first, end: count.min(first + ROWS_TOGETHER), stride: count };
            columns.fill(slots, x, place.first..place.end);
            let panels = bytes.chunks(PANEL_ROWS * row_bytes);
            for (bytes, out) in panels.zip(out.chunks_mut(PANEL_ROWS * count)) {
                match ty {
                    QuantType::Q8_0 => panel.fill::<34>(slots, bytes, |block| q8_0(block)),
                    QuantType::MXFP4 => panel.fill::<17>(slots, bytes, |block| mxfp4(block)),
                    ty => panic!("{ty} does not have blocks of 32"),
                }
                for t in 0..(place.end - place.first).div_ceil(SIDE) {
                    tile(&tiles, slots, panel, columns, (place, t), out);
                }
            }
        }
    });
}

/// Codes and factor of a Q8_0 block.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,f16c")]
fn q8_0(block: &[u8; 34]) -> (__m256i, f32) {
    let bits = u16::from_le_bytes(*bytes_at(block, 0));
    let d = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))));
    (load256(bytes_at::<32, 34>(block, 2)), d)
}

/// Codes and factor of an MXFP4 block.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn mxfp4(block: &[u8; 17]) -> (__m256i, f32) {
    let bytes = load128(bytes_at::<16, 17>(block, 1));
    let nibbles = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes), _mm256_set1_epi8(15));
    let values = _mm256_broadcastsi128_si256(load128(&mxfp4::CODES));
    (_mm256_shuffle_epi8(values, nibbles), mxfp4::scale(block[0]))
}

impl Panel {
    /// Takes up to 64 rows. What it holds of rows that are not there is never stored.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn fill<const B: usize>(&mut self, slots: Slots, bytes: &[u8], decode: impl Fn(&[u8; B]) -> (__m256i, f32)) {
        self.codes.resize(slots.len(), [[[0; 32]; SIDE]; PLANES]);
        self.factors.resize(slots.len(), [0.0; PANEL_ROWS]);
        let all = bytes.as_chunks::<B>().0;
        // Some blocks of all rows at a time: what is written stays in a first-level cache until its lines are whole.
        for first in (0..slots.blocks).step_by(OCTET) {
            for r in 0..all.len() / slots.blocks {
                for b in first..slots.blocks.min(first + OCTET) {
                    let at = slots.of_block(b);
                    let (codes, d) = decode(&all[r * slots.blocks + b]);
                    store256(&mut self.codes[at][r / SIDE][r % SIDE], codes);
                    self.factors[at][r] = d;
                }
            }
        }
    }
}

impl Columns {
    /// Takes rows `x(range)`; what would follow them in the last tile is zero.
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn fill<'a>(&mut self, slots: Slots, x: &dyn Fn(usize) -> &'a [Step32], range: Range<usize>) {
        static ZERO: Step32 = Step32 { codes: [0; 512], offsets: [0; 16], scales: [0.0; 16] };
        let tiles = range.len().div_ceil(SIDE);
        self.codes.resize(tiles * slots.len(), [Line::ZERO; DEPTH]);
        self.scales.resize(tiles * slots.len(), Line::ZERO);
        for t in 0..tiles {
            let mut rows: [&[Step32]; SIDE] = [&[]; SIDE];
            for i in 0..SIDE.min(range.len() - t * SIDE) {
                rows[i] = x(range.start + t * SIDE + i);
            }
            for step in 0..slots.blocks.div_ceil(16) {
                let mut x = [&ZERO; SIDE];
                for i in 0..SIDE {
                    x[i] = rows[i].get(step).unwrap_or(&ZERO);
                }
                self.fill_step(slots, &x, (t, step));
            }
        }
    }

    /// Codes and scales of one step of 16 rows.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn fill_step(&mut self, slots: Slots, x: &[&Step32; SIDE], (t, step): (usize, usize)) {
        let count = 16.min(slots.blocks - 16 * step);
        let at = |i: usize| t * slots.len() + slots.of_block(16 * step + i);
        let mut lines = [_mm512_setzero_si512(); SIDE];
        for pair in 0..count.div_ceil(2) {
            for i in 0..SIDE {
                lines[i] = load512(part::<i8, 64>(&x[i].codes, pair));
            }
            let lines = transposed(lines);
            for half in 0..2.min(count - 2 * pair) {
                let into = &mut self.codes[at(2 * pair + half)];
                for l in 0..DEPTH {
                    store512(&mut into[l].0, lines[DEPTH * half + l]);
                }
            }
        }
        for i in 0..SIDE {
            lines[i] = load512(&x[i].scales);
        }
        let lines = transposed(lines);
        for i in 0..count {
            store512(&mut self.scales[at(i)].0, lines[i]);
        }
    }
}

/// Proof that tiles 0 to 3 have 16 rows of 64 bytes, tile 4 eight of 64, and tiles 5 to 7 have 16 rows of 32.
struct Tiles(Configured);

impl Tiles {
    /// Whole sums of a block for each of four tiles of weights.
    #[inline(always)]
    fn multiply(&self, weights: &[[[i8; 32]; SIDE]; PLANES], activations: &[Line; DEPTH], sums: &mut [Square; PLANES]) {
        // SAFETY: `self` says that a tile of activations is the eight lines given, one of weights 512 bytes of the four times 512, and one of
        // sums one of the four squares.
        unsafe {
            asm!(
                "tileloadd tmm4, [{x} + {line}*1]",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tileloadd tmm5, [{w} + {half}*1]",
                "tileloadd tmm6, [{w} + {half}*1 + 512]",
                "tdpbssd tmm0, tmm5, tmm4",
                "tileloadd tmm7, [{w} + {half}*1 + 1024]",
                "tdpbssd tmm1, tmm6, tmm4",
                "tileloadd tmm5, [{w} + {half}*1 + 1536]",
                "tdpbssd tmm2, tmm7, tmm4",
                "tdpbssd tmm3, tmm5, tmm4",
                "tilestored [{sums} + {line}*1], tmm0",
                "tilestored [{sums} + {line}*1 + 1024], tmm1",
                "tilestored [{sums} + {line}*1 + 2048], tmm2",
                "tilestored [{sums} + {line}*1 + 3072], tmm3",
                x = in(reg) activations.as_ptr(), w = in(reg) weights.as_ptr(), sums = in(reg) sums.as_mut_ptr(),
                line = in(reg) 64usize, half = in(reg) 32usize, options(nostack, preserves_flags),
            );
        }
    }
}

/// The panel times tile `t` of the activations.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn tile(tiles: &Tiles, slots: Slots, panel: &Panel, columns: &Columns, (place, t): (Place, usize), out: &mut [f32]) {
    let activations = &columns.codes[t * slots.len()..][..slots.len()];
    let scales = &columns.scales[t * slots.len()..][..slots.len()];
    let mut sums = [[[Line::ZERO; SIDE]; PLANES]; OCTET];
    let mut whole = [[[Line::ZERO; SIDE]; PLANES]; 2];
    for (s, sums) in sums.iter_mut().enumerate() {
        let range = slots.of_sum(s);
        if let Some(first) = range.clone().next() {
            tiles.multiply(&panel.codes[first], &activations[first], &mut whole[first % 2]);
        }
        for at in range.clone() {
            // One ahead: a tile takes dozens of cycles from its loads to its stores.
            if at + 1 < range.end {
                tiles.multiply(&panel.codes[at + 1], &activations[at + 1], &mut whole[(at + 1) % 2]);
            }
            add_block(&whole[at % 2], &panel.factors[at], &scales[at], sums);
        }
    }
    store_results(place, t, out, |r| {
        let mut four = [_mm512_setzero_ps(); 4];
        for i in 0..4 {
            let pair = [i, i + 4].map(|s| load_ps(&sums[s][r / SIDE][r % SIDE]));
            four[i] = _mm512_add_ps(pair[0], pair[1]);
        }
        _mm512_add_ps(_mm512_add_ps(four[0], four[2]), _mm512_add_ps(four[1], four[3]))
    });
}

/// Adds the whole numbers of a block, under their factors, to running sums.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn add_block(whole: &[Square; PLANES], factors: &[f32; PANEL_ROWS], scales: &Line, sums: &mut [Square; PLANES]) {
    let scales = load_ps(scales);
    for r in 0..PANEL_ROWS {
        let value = _mm512_cvtepi32_ps(load512(&whole[r / SIDE][r % SIDE].0));
        let factor = _mm512_mul_ps(_mm512_set1_ps(factors[r]), scales);
        let sum = &mut sums[r / SIDE][r % SIDE];
        let total = _mm512_fmadd_ps(value, factor, load_ps(sum));
        store_ps(sum, total);
    }
}
