//! Many activation rows at once, on matrix tiles (AMX): 16 weight rows by 16 activation rows. Owns what both block sizes share: whether
//! there are tiles, their configuration, the order of activations in them.
//! Never sums floats in another order than the row kernels: a tile product is the whole number of one block for each of its 256 pairs.
//! Surprising fact: the system must be asked once before a process may touch a tile register; without that it dies.

mod block256;
mod block32;

pub(super) use block32::product as product32;
pub(super) use block256::product as product256;

use super::*;
use std::ops::Range;
use std::sync::OnceLock;

/// Rows and columns of a tile of sums.
const SIDE: usize = 16;
/// Tiles of weights that are multiplied with one tile of activations at a time.
const PLANES: usize = 4;
/// Most activation rows that are arranged together: at 5,120 columns 1.5 MB, three quarters of a second-level cache of 2 MiB.
const ROWS_TOGETHER: usize = 256;

/// Sixteen 32-bit values of whatever kind.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; 16]);

impl Line {
    const ZERO: Line = Line([0; 16]);
}

/// A tile in memory.
type Square = [Line; SIDE];

/// Bytes that a thread keeps to multiply `rows` activation rows of `cols` columns with weights of `ty`.
pub(super) fn scratch_bytes(ty: QuantType, cols: usize, rows: usize) -> u64 {
    let tiles = rows.min(ROWS_TOGETHER).div_ceil(SIDE);
    if ty.block_values() == 256 { block256::scratch_bytes(cols, tiles) } else { block32::scratch_bytes(cols, tiles) }
}

/// Whether the processor has tiles of 8-bit codes and the system lets this process use them (it has to be asked once).
pub(super) fn are_available() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        /// Leaf 7, EDX: AMX-TILE and AMX-INT8.
        const TILES: u32 = 1 << 24 | 1 << 25;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILES == TILES && ask_system()
    })
}

#[cfg(target_os = "linux")]
fn ask_system() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: passes two numbers and no memory; afterwards threads of this process may use tile registers.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn ask_system() -> bool {
    false
}

/// Where the results of the arranged activation rows go.
#[derive(Clone, Copy)]
struct Place {
    first: usize,
    end: usize,
    stride: usize,
}

/// Stores line `r` of the results of tile `t` for each weight row `r` of `out`.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_results(place: Place, t: usize, out: &mut [f32], line: impl Fn(usize) -> __m512) {
    let Place { first, end, stride } = place;
    let (first, count) = (first + t * SIDE, SIDE.min(end - first - t * SIDE));
    for (r, out) in out.chunks_mut(stride).enumerate() {
        let mut values = Line::ZERO;
        store_ps(&mut values, _mm512_add_ps(line(r), _mm512_setzero_ps()));
        let values: &[f32; SIDE] = bytemuck::cast_ref(&values.0);
        out[first..first + count].copy_from_slice(&values[..count]);
    }
}

/// Word `i` of line `j` to word `j` of line `i`.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(lines: [__m512i; SIDE]) -> [__m512i; SIDE] {
    // Of four lines, the words `4 q + i` side by side in quarter `q` of line `i`.
    let mut fours = [[_mm512_setzero_si512(); 4]; 4];
    for g in 0..4 {
        let (a, b) = (lines[4 * g], lines[4 * g + 1]);
        let (c, d) = (lines[4 * g + 2], lines[4 * g + 3]);
        let (low_ab, high_ab) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (low_cd, high_cd) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        fours[0][g] = _mm512_unpacklo_epi64(low_ab, low_cd);
        fours[1][g] = _mm512_unpackhi_epi64(low_ab, low_cd);
        fours[2][g] = _mm512_unpacklo_epi64(high_ab, high_cd);
        fours[3][g] = _mm512_unpackhi_epi64(high_ab, high_cd);
    }
    let mut out = lines;
    for i in 0..4 {
        let [a, b, c, d] = fours[i];
        let (front_ab, back_ab) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0xee>(a, b));
        let (front_cd, back_cd) = (_mm512_shuffle_i32x4::<0x44>(c, d), _mm512_shuffle_i32x4::<0xee>(c, d));
        out[i] = _mm512_shuffle_i32x4::<0x88>(front_ab, front_cd);
        out[i + 4] = _mm512_shuffle_i32x4::<0xdd>(front_ab, front_cd);
        out[i + 8] = _mm512_shuffle_i32x4::<0x88>(back_ab, back_cd);
        out[i + 12] = _mm512_shuffle_i32x4::<0xdd>(back_ab, back_cd);
    }
    out
}

/// The tile registers in shapes that one of the block sizes chose.
struct Configured;

impl Configured {
    /// `shapes` are bytes of a row and rows of each tile. Only where tiles are available.
    fn new(shapes: [(u8, u8); 8]) -> Self {
        let mut config = Line::ZERO;
        let bytes: &mut [u8; 64] = bytemuck::cast_mut(&mut config.0);
        // Palette, then bytes of a row at 16 + 2 tile, rows at 48 + tile.
        bytes[0] = 1;
        for (tile, (row_bytes, rows)) in shapes.into_iter().enumerate() {
            assert!(row_bytes <= 64 && rows <= 16, "a tile has at most 16 rows of 64 bytes");
            (bytes[16 + 2 * tile], bytes[48 + tile]) = (row_bytes, rows);
        }
        // SAFETY: reads the 64 bytes of `config`, a valid configuration; tiles are available where this is called.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags, readonly)) };
        Configured
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: gives the tile registers up; nothing else uses them.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// 32 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn store256<T: bytemuck::Pod, const N: usize>(into: &mut [T; N], values: __m256i) {
    const { assert!(size_of::<T>() * N == 32) };
    // SAFETY: the array is 32 writable bytes of plain data; the store has no alignment requirement.
    unsafe { _mm256_storeu_si256(into.as_mut_ptr().cast(), values) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_ps(line: &Line) -> __m512 {
    _mm512_castsi512_ps(load512(&line.0))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_ps(line: &mut Line, values: __m512) {
    store512(&mut line.0, _mm512_castps_si512(values));
}
