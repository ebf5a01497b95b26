//! Weights in blocks of 256 on tiles. Owns their form there: one or two bytes a value, scales multiplied in, so that a tile product sums a
//! block without a pause. Never holds more than a panel of weight rows, which stays in a second-level cache while up to 256 activation rows
//! pass over it. Surprising fact: Q3_K values are kept negative, since 4 x -32 fits a byte and 4 x 32 does not.

use super::super::block256::{
    Unpacked, add_word_dots, grid_codes, grid_pair, u16_at, u32_at, unpack_q2_k, unpack_q3_k, unpack_q4_k, unpack_q6_k,
};
use super::*;
use std::cell::RefCell;

/// Steps of 64 values, the most that a tile holds of a row, in a block.
const STEPS: usize = 4;

/// Activation rows, 16 to a tile.
#[derive(Default)]
struct Columns {
    blocks: usize,
    /// `[tile][blocks][step][16]`: line `i` holds codes `64 step + 4 i ..` of each of 16 rows.
    codes: Vec<Line>,
    /// `[tile][blocks][8]`: pairs of sums of 16 codes of each of 16 rows.
    sums: Vec<Line>,
    /// `[tile][blocks]`: scales, F32.
    scales: Vec<Line>,
}

/// A panel of weight rows: 32 if a value takes two bytes, else 64.
#[derive(Default)]
struct Panel {
    /// `[blocks][step][plane][16 rows]`: 64 values of a row. Two planes are low and high bytes of the same rows.
    codes: Vec<Line>,
    /// `[blocks][rows]`: factors of scales and of minima.
    factors: Vec<[f32; 2]>,
    /// `[blocks][rows]`: minima in pairs of words.
    mins: Vec<[i32; 8]>,
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
    let column_lines = tiles * (STEPS * SIDE + 8 + 1);
    let panel_bytes = STEPS * size_of::<[Square; PLANES]>() + PLANES * SIDE * size_of::<([f32; 2], [i32; 8])>();
    (cols / 256 * (column_lines * size_of::<Line>() + panel_bytes)) as u64
}

/// `out[o][a]` = weight row `o` times activation row `x(a)`, for all `a` below `count`. Only where tiles are available.
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
pub(in super::super) fn product<'a>(
    (ty, bytes, row_bytes): (QuantType, &[u8], usize),
    (x, count): (&dyn Fn(usize) -> &'a [Block256], usize),
    out: &mut [f32],
) {
    assert_eq!(out.len(), bytes.len() / row_bytes * count, "output of {} x {count}", bytes.len() / row_bytes);
    SCRATCH.with_borrow_mut(|Scratch { columns, panel }| {
        let tiles = Tiles(Configured::new([(64, 16); 8]));
        for first in (0..count).step_by(ROWS_TOGETHER) {
            let end = count.min(first + ROWS_TOGETHER);
            columns.fill(x, first..end);
            let place = Place { first, end, stride: count };
            let run = Run { columns, tiles: &tiles, place };
            match ty {
                QuantType::Q2_K => run.all::<84, false, true>(panel, bytes, out, |block| {
                    let w = unpack_q2_k::<true>(block);
                    Products { low: w.codes, high: w.codes, mins: w.sub_blocks, factors: halves(u32_at(block, 80)) }
                }),
                QuantType::Q4_K => run.all::<144, true, true>(panel, bytes, out, |block| {
                    let w = unpack_q4_k(block);
                    Products::new(w.codes, &w, halves(u32_at(block, 0)))
                }),
                QuantType::Q3_K => run.all::<110, false, false>(panel, bytes, out, |block| {
                    let w = unpack_q3_k(block);
                    // Negative: 4 x -32 fits a byte and 4 x 32 does not.
                    let codes = w.codes.map(|codes| _mm512_sub_epi8(_mm512_set1_epi8(4), codes));
                    Products::new(codes, &w, halves(u16_at(block, 108)))
                }),
                QuantType::Q6_K => run.all::<210, true, false>(panel, bytes, out, |block| {
                    let w = unpack_q6_k(block);
                    let codes = w.codes.map(|codes| _mm512_sub_epi8(codes, _mm512_set1_epi8(32)));
                    Products::new(codes, &w, halves(u16_at(block, 208)))
                }),
                QuantType::IQ2_XXS => run.all::<66, true, false>(panel, bytes, out, |block| iq2_xxs(block)),
                ty => panic!("{ty} does not have blocks of 256"),
            }
        }
    });
}

/// Factors of scales and minima.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,f16c")]
fn halves(bytes: u32) -> [f32; 2] {
    let both = _mm_cvtph_ps(_mm_cvtsi32_si128(bytes as i32));
    [_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both))]
}

/// A block of weights, scales multiplied in.
struct Products {
    /// The low byte of each product.
    low: [__m512i; 4],
    /// The bits above, signed.
    high: [__m512i; 4],
    /// 16 words.
    mins: __m256i,
    factors: [f32; 2],
}

impl Products {
    /// Signed codes times the scales of `w`.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn new(codes: [__m512i; 4], w: &Unpacked, factors: [f32; 2]) -> Self {
        let (mut low, mut high) = (codes, codes);
        for k in 0..4 {
            (low[k], high[k]) = split_products(codes[k], w.scales[k]);
        }
        Products { low, high, mins: w.sub_blocks, factors }
    }
}

/// Low and high bytes of signed codes times the scales of their fours.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn split_products(codes: __m512i, scales: __m512i) -> (__m512i, __m512i) {
    const ODD_BYTES: u64 = 0xaaaa_aaaa_aaaa_aaaa;
    let scales = _mm512_or_si512(scales, _mm512_slli_epi32::<16>(scales));
    let even = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(codes)), scales);
    let odd = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(codes), scales);
    let low = _mm512_mask_mov_epi8(even, ODD_BYTES, _mm512_slli_epi16::<8>(odd));
    let high = _mm512_mask_mov_epi8(_mm512_srli_epi16::<8>(even), ODD_BYTES, odd);
    (low, high)
}

/// An IQ2_XXS block.
#[inline]
#[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
fn iq2_xxs(block: &[u8; 66]) -> Products {
    let pair = grid_pair(block, block);
    let (mut low, mut high) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
    for k in 0..4 {
        let (magnitudes, scales, negative) = grid_codes(&pair, 0, k);
        let codes = _mm512_mask_sub_epi8(magnitudes, negative, _mm512_setzero_si512(), magnitudes);
        (low[k], high[k]) = split_products(codes, scales);
    }
    let [d, _] = halves(u16_at(block, 0));
    Products { low, high, mins: _mm256_setzero_si256(), factors: [d * 0.125, 0.0] }
}

impl Panel {
    /// Takes up to a panel of rows. What it holds of rows that are not there is never stored.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn fill<const B: usize, const WIDE: bool, const MINS: bool>(
        &mut self,
        bytes: &[u8],
        blocks: usize,
        products: impl Fn(&[u8; B]) -> Products,
    ) {
        let rows = panel_rows(WIDE);
        self.codes.resize(blocks * STEPS * PLANES * SIDE, Line::ZERO);
        self.factors.resize(blocks * rows, [0.0; 2]);
        self.mins.resize(blocks * rows, [0; 8]);
        let all = bytes.as_chunks::<B>().0;
        // A block of all rows at a time: what is written lies together.
        for b in 0..blocks {
            for r in 0..all.len() / blocks {
                let w = products(&all[r * blocks + b]);
                let planes = if WIDE { 2 } else { 1 };
                for k in 0..STEPS {
                    let at = ((b * STEPS + k) * PLANES + r / SIDE * planes) * SIDE + r % SIDE;
                    store512(&mut self.codes[at].0, w.low[k]);
                    if WIDE {
                        store512(&mut self.codes[at + SIDE].0, w.high[k]);
                    }
                }
                self.factors[b * rows + r] = w.factors;
                if MINS {
                    store256(&mut self.mins[b * rows + r], w.mins);
                }
            }
        }
    }
}

/// Weight rows of a panel.
const fn panel_rows(is_wide: bool) -> usize {
    if is_wide { PLANES / 2 * SIDE } else { PLANES * SIDE }
}

impl Columns {
    /// Takes rows `x(range)`; what would follow them in the last tile is zero.
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn fill<'a>(&mut self, x: &dyn Fn(usize) -> &'a [Block256], range: Range<usize>) {
        static ZERO: Block256 = Block256 { codes: [0; 256], sums: [0; 16], scales: [0.0; 4] };
        let (blocks, tiles) = (x(range.start).len(), range.len().div_ceil(SIDE));
        self.blocks = blocks;
        self.codes.resize(tiles * blocks * STEPS * SIDE, Line::ZERO);
        self.sums.resize(tiles * blocks * 8, Line::ZERO);
        self.scales.resize(tiles * blocks, Line::ZERO);
        for t in 0..tiles {
            let mut rows: [&[Block256]; SIDE] = [&[]; SIDE];
            for i in 0..SIDE.min(range.len() - t * SIDE) {
                rows[i] = x(range.start + t * SIDE + i);
            }
            for b in 0..blocks {
                let mut x = [&ZERO; SIDE];
                for i in 0..SIDE {
                    x[i] = rows[i].get(b).unwrap_or(&ZERO);
                }
                let at = t * blocks + b;
                self.fill_block(&x, at);
                for i in 0..SIDE {
                    self.scales[at].0[i] = x[i].scales[b % 4].to_bits();
                }
            }
        }
    }

    /// Codes and sums of one block of 16 rows.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn fill_block(&mut self, x: &[&Block256; SIDE], at: usize) {
        let mut lines = [_mm512_setzero_si512(); SIDE];
        for k in 0..STEPS {
            for i in 0..SIDE {
                lines[i] = load512(part::<i8, 64>(&x[i].codes, k));
            }
            let lines = transposed(lines);
            for i in 0..SIDE {
                store512(&mut self.codes[(at * STEPS + k) * SIDE + i].0, lines[i]);
            }
        }
        for i in 0..SIDE {
            lines[i] = _mm512_zextsi256_si512(load256(&x[i].sums));
        }
        let lines = transposed(lines);
        for l in 0..8 {
            store512(&mut self.sums[at * 8 + l].0, lines[l]);
        }
    }
}

/// Proof that every tile register has 16 rows of 64 bytes.
struct Tiles(Configured);

impl Tiles {
    /// Sums of a block for each of four tiles of weights: `[step][plane]` times `[step]` of activations. Without `WIDE` all planes are
    /// unsigned if there are `MINS`, else signed; with it, low bytes are unsigned and high ones signed.
    #[inline(always)]
    fn multiply<const WIDE: bool, const MINS: bool>(
        &self,
        weights: &[[Square; PLANES]; STEPS],
        activations: &[Square; STEPS],
        sums: &mut [Square; PLANES],
    ) {
        macro_rules! run {
            ($even:literal, $odd:literal) => {
                // SAFETY: `self` says that tiles are 16 rows of 64 bytes, which is what lies in each square; of them four are read of the
                // activations and sixteen of the weights, in order, and four are written.
                unsafe {
                    asm!(
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                        "2:",
                        "tileloadd tmm4, [{x} + {line}*1]",
                        "tileloadd tmm5, [{w} + {line}*1]",
                        "tileloadd tmm6, [{w} + {line}*1 + 1024]",
                        concat!($even, " tmm0, tmm5, tmm4"),
                        concat!($odd, " tmm1, tmm6, tmm4"),
                        "tileloadd tmm7, [{w} + {line}*1 + 2048]",
                        "tileloadd tmm5, [{w} + {line}*1 + 3072]",
                        concat!($even, " tmm2, tmm7, tmm4"),
                        concat!($odd, " tmm3, tmm5, tmm4"),
                        "add {x}, 1024", "add {w}, 4096", "dec {steps}", "jnz 2b",
                        "tilestored [{sums} + {line}*1], tmm0",
                        "tilestored [{sums} + {line}*1 + 1024], tmm1",
                        "tilestored [{sums} + {line}*1 + 2048], tmm2",
                        "tilestored [{sums} + {line}*1 + 3072], tmm3",
                        x = inout(reg) activations.as_ptr() => _, w = inout(reg) weights.as_ptr() => _,
                        steps = inout(reg) STEPS => _, sums = in(reg) sums.as_mut_ptr(), line = in(reg) 64usize,
                        options(nostack),
                    )
                }
            };
        }
        match (WIDE, MINS) {
            (false, true) => run!("tdpbusd", "tdpbusd"),
            (false, false) => run!("tdpbssd", "tdpbssd"),
            (true, _) => run!("tdpbusd", "tdpbssd"),
        }
    }
}

/// Everything but the weights.
struct Run<'a> {
    columns: &'a Columns,
    tiles: &'a Tiles,
    place: Place,
}

/// Running sums of each tile of results: `[tile][block % 4][weight row][activation row]`, F32.
type Sums = [[Square; 4]; PLANES];

impl Run<'_> {
    /// All weight rows, a panel at a time.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn all<const B: usize, const WIDE: bool, const MINS: bool>(
        &self,
        panel: &mut Panel,
        bytes: &[u8],
        out: &mut [f32],
        products: impl Fn(&[u8; B]) -> Products,
    ) {
        let (rows, Place { first, end, stride }) = (panel_rows(WIDE), self.place);
        let bytes = bytes.chunks(rows * self.columns.blocks * B);
        for (bytes, out) in bytes.zip(out.chunks_mut(rows * stride)) {
            panel.fill::<B, WIDE, MINS>(bytes, self.columns.blocks, &products);
            for t in 0..(end - first).div_ceil(SIDE) {
                self.tile::<WIDE, MINS>(panel, t, out);
            }
        }
    }

    /// The panel times tile `t` of the activations.
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn tile<const WIDE: bool, const MINS: bool>(&self, panel: &Panel, t: usize, out: &mut [f32]) {
        let blocks = self.columns.blocks;
        let weights = panel.codes.as_chunks::<SIDE>().0.as_chunks::<PLANES>().0.as_chunks::<STEPS>().0;
        let activations = &self.columns.codes.as_chunks::<SIDE>().0.as_chunks::<STEPS>().0[t * blocks..][..blocks];
        let mut sums: Sums = [[[Line::ZERO; SIDE]; 4]; PLANES];
        let mut whole = [[[Line::ZERO; SIDE]; PLANES]; 2];
        self.tiles.multiply::<WIDE, MINS>(&weights[0], &activations[0], &mut whole[0]);
        for b in 0..blocks {
            // One ahead: a tile takes dozens of cycles from its loads to its stores.
            if b + 1 < blocks {
                self.tiles.multiply::<WIDE, MINS>(&weights[b + 1], &activations[b + 1], &mut whole[(b + 1) % 2]);
            }
            self.add_block::<WIDE, MINS>(panel, t, b, &whole[b % 2], &mut sums);
        }
        store_results(self.place, t, out, |r| {
            let [a, b, c, d] = &sums[r / SIDE];
            let [a, b, c, d] = [a, b, c, d].map(|square| load_ps(&square[r % SIDE]));
            _mm512_add_ps(_mm512_add_ps(a, c), _mm512_add_ps(b, d))
        });
    }

    /// Adds the whole numbers of block `b`, under their factors, to the running sums.
    #[inline]
    #[target_feature(enable = "avx512vbmi,avx512vnni,avx512dq,avx512vl,gfni")]
    fn add_block<const WIDE: bool, const MINS: bool>(
        &self,
        panel: &Panel,
        t: usize,
        b: usize,
        whole: &[Square; PLANES],
        sums: &mut Sums,
    ) {
        let (rows, at) = (panel_rows(WIDE), t * self.columns.blocks + b);
        let scales = load_ps(&self.columns.scales[at]);
        let mut run_sums = [_mm512_setzero_si512(); 8];
        for l in 0..8 {
            run_sums[l] = load512(&self.columns.sums[at * 8 + l].0);
        }
        let (factors, mins) = (&panel.factors[b * rows..][..rows], &panel.mins[b * rows..][..rows]);
        for r in 0..rows {
            let (tile, r0) = (r / SIDE, r % SIDE);
            let value = if WIDE {
                let high = _mm512_slli_epi32::<8>(load512(&whole[2 * tile + 1][r0].0));
                _mm512_add_epi32(load512(&whole[2 * tile][r0].0), high)
            } else {
                load512(&whole[tile][r0].0)
            };
            let value = _mm512_cvtepi32_ps(value);
            let [d, dmin] = factors[r];
            let factor = _mm512_mul_ps(_mm512_set1_ps(d), scales);
            let sum = &mut sums[tile][b % 4][r0];
            let mut total = load_ps(sum);
            total = match (WIDE, MINS) {
                // Such a panel holds negative values.
                (false, false) => _mm512_fnmadd_ps(value, factor, total),
                _ => _mm512_fmadd_ps(value, factor, total),
            };
            if MINS {
                let mut whole = _mm512_madd_epi16(_mm512_set1_epi32(mins[r][0]), run_sums[0]);
                for l in 1..8 {
                    whole = add_word_dots(whole, run_sums[l], _mm512_set1_epi32(mins[r][l]));
                }
                let factor = _mm512_mul_ps(_mm512_set1_ps(dmin), scales);
                total = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(whole), factor, total);
            }
            store_ps(sum, total);
        }
    }
}
