//! Argument structs of the ops: inputs and shapes, one struct an op. Outputs are separate arguments of the trait.
//! Never holds host memory. Surprising fact: positions are never stored; row `r` of a chunk is at `first_pos + r`.

use std::ops::Range;

use super::Backend;

/// Rows of an embedding table.
pub struct Embed<'a, B: Backend> {
    /// `[vocab, hidden]`.
    pub table: B::MatView<'a>,
    /// `[rows]` token ids, each below the table's rows.
    pub ids: &'a B::Ids,
    pub rows: usize,
    /// How often each row is written (parallel residual streams).
    pub copies: usize,
}

/// Product with a weight matrix. With `groups > 1` the matrix is that many equal blocks of rows, and each block reads
/// its own part of an input row.
/// (The matrix has a lifetime of its own: a lender's may be longer than the work buffer's.)
pub struct Matmul<'w, 'a, B: Backend> {
    /// `[outputs, inputs of one group]`.
    pub w: B::MatView<'w>,
    /// `[rows, groups, inputs of one group]`.
    pub x: &'a B::Buf,
    pub rows: usize,
    pub groups: usize,
}

/// Products of the same rows with two matrices.
pub struct MatmulPair<'w, 'a, B: Backend> {
    /// `[outputs, inputs]`.
    pub a: B::MatView<'w>,
    /// `[outputs, inputs]`.
    pub b: B::MatView<'w>,
    /// `[rows, inputs]`.
    pub x: &'a B::Buf,
    pub rows: usize,
}

/// `x * rsqrt(mean(x^2) + eps) * weight` for each row.
pub struct RmsNorm<'a, B: Backend> {
    /// `[rows, width]`.
    pub x: &'a B::Buf,
    /// `[width]`.
    pub weight: &'a B::Buf,
    pub rows: usize,
    pub width: usize,
    pub eps: f32,
}

/// Rotation of interleaved pairs in the last `rotary` values of each head.
pub struct Rope<'a, B: Backend> {
    /// `[rotary / 2]` angle per position.
    pub freqs: &'a B::Buf,
    pub rows: usize,
    pub heads: usize,
    pub width: usize,
    pub rotary: usize,
    pub first_pos: usize,
    /// Positions from one row to the next.
    pub pos_step: usize,
    /// Rotate backwards.
    pub inverse: bool,
}

/// Number formats of the caches (values are rounded to them and kept as F32).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheFormat {
    /// E4M3 with a power-of-two scale for each 32 values.
    Fp8Block32,
    /// E2M1 with a power-of-two scale for each 32 values.
    Fp4Block32,
    /// E2M1 with an E4M3 scale for each 16 values.
    Fp4Block16,
    /// E4M3 with a power-of-two scale for each 64 values of a row, the last block of a row being what is left; rows are `width` values, of
    /// which the last `tail` stay as they are.
    Fp8Heads { width: usize, tail: usize },
}

/// Rounding of freshly computed cache rows.
pub struct RoundCache {
    pub format: CacheFormat,
    /// Values from the start of the buffer, whole blocks or rows.
    pub values: usize,
}

/// Copy of rows to `slot = (first_slot + r) mod slots`.
pub struct StoreRows<'a, B: Backend> {
    /// `[rows, width]`.
    pub src: &'a B::Buf,
    pub rows: usize,
    pub width: usize,
    pub first_slot: usize,
    pub slots: usize,
}

/// Softmax-gated sum of tokens (2j, 2j+1), channel by channel.
pub struct PoolPairs<'a, B: Backend> {
    /// `[rows, width]`.
    pub values: &'a B::Buf,
    /// `[rows, width]`.
    pub gates: &'a B::Buf,
    /// `[width]` of the token before row 0, read only if `first_pos` is odd.
    pub open_values: &'a B::Buf,
    /// `[width]`, likewise.
    pub open_gates: &'a B::Buf,
    pub rows: usize,
    pub width: usize,
    pub first_pos: usize,
}

/// Where pooled pairs go.
pub struct PairsOut<'a, B: Backend> {
    /// `[closed pairs, width]`.
    pub pooled: &'a mut B::Buf,
    /// `[width]`: the last row, written if it leaves a pair open.
    pub open_values: &'a mut B::Buf,
    /// `[width]`, likewise.
    pub open_gates: &'a mut B::Buf,
}

/// Softmax-gated sum of the tokens of a group, channel by channel. Group `n` covers the positions from `n * ratio` on; one that overlaps
/// also takes the positions of the group before it, from the first half of their rows, and its own from the second half.
pub struct PoolGroups<'a, B: Backend> {
    /// `[slots, row]`, a ring: position `p` is in slot `p mod slots`. `row` is `width`, or twice that with overlap.
    pub values: &'a B::Buf,
    /// `[slots, row]`, likewise.
    pub gates: &'a B::Buf,
    /// `[ratio, row]`: added to the gates, by position in the group.
    pub bias: &'a B::Buf,
    pub slots: usize,
    pub width: usize,
    pub ratio: usize,
    pub overlaps: bool,
    /// Groups that are complete; row 0 of the output is the first of them.
    pub groups: Range<usize>,
}

/// From raw mix values to coefficients: norm factor, scale, base, sigmoid, Sinkhorn.
pub struct HcCoefficients<'a, B: Backend> {
    /// `[rows, streams, hidden]`, for the norm factor.
    pub streams: &'a B::Buf,
    /// `[rows, streams * (streams + 2)]`: the mix matrix applied to the raw streams.
    pub mix: &'a B::Buf,
    /// `[streams * (streams + 2)]`.
    pub base: &'a B::Buf,
    /// `[3]`: for pre, post and combination.
    pub scale: &'a B::Buf,
    pub rows: usize,
    pub stream_count: usize,
    pub hidden: usize,
    pub rms_eps: f32,
    pub hc_eps: f32,
    pub iterations: usize,
}

/// Where coefficients go.
pub struct HcOut<'a, B: Backend> {
    /// `[rows, streams]`.
    pub pre: &'a mut B::Buf,
    /// `[rows, streams]`.
    pub post: &'a mut B::Buf,
    /// `[rows, streams (source), streams (destination)]`.
    pub comb: &'a mut B::Buf,
}

/// How a sublayer begins: coefficients from the streams, and the norm of the streams' weighted sum.
pub struct HcEnter<'w, 'a, B: Backend> {
    /// `[streams * (streams + 2), streams * hidden]`: the mix matrix.
    pub w: B::MatView<'w>,
    /// `[rows, streams, hidden]`.
    pub streams: &'a B::Buf,
    /// `[streams * (streams + 2)]`.
    pub base: &'a B::Buf,
    /// `[3]`: for pre, post and combination.
    pub scale: &'a B::Buf,
    /// `[rows, streams]`: weights of the sum; `None` for the op's own `pre`.
    pub weights: Option<&'a B::Buf>,
    /// `[hidden]`: weights of the norm.
    pub norm: &'a B::Buf,
    pub rows: usize,
    pub stream_count: usize,
    pub hidden: usize,
    /// Of both norms.
    pub rms_eps: f32,
    pub hc_eps: f32,
    pub iterations: usize,
}

/// Where the beginning of a sublayer goes.
pub struct HcEntered<'a, B: Backend> {
    pub coefficients: HcOut<'a, B>,
    /// `[rows, streams * (streams + 2)]`: what was in it is lost.
    pub mix: &'a mut B::Buf,
    /// `[rows, hidden]`: likewise.
    pub collapsed: &'a mut B::Buf,
    /// `[rows, hidden]`: the normalised sum.
    pub x: &'a mut B::Buf,
}

/// Weighted sum over the streams.
pub struct HcCollapse<'a, B: Backend> {
    /// `[rows, streams, hidden]`.
    pub streams: &'a B::Buf,
    /// `[rows, streams]`.
    pub weights: &'a B::Buf,
    pub rows: usize,
    pub stream_count: usize,
    pub hidden: usize,
}

/// `R'[i] = post_i * y + sum_j comb[j][i] * R[j]`.
pub struct HcExpand<'a, B: Backend> {
    /// `[rows, hidden]`.
    pub y: &'a B::Buf,
    /// `[rows, streams]`.
    pub post: &'a B::Buf,
    /// `[rows, streams, streams]`.
    pub comb: &'a B::Buf,
    pub rows: usize,
    pub stream_count: usize,
    pub hidden: usize,
}

/// Which compressed rows a token sees: groups of `ratio` tokens that are complete at its position.
#[derive(Clone, Copy, Debug)]
pub struct Visibility {
    /// Position of the chunk's row 0.
    pub first_pos: usize,
    pub ratio: usize,
}

impl Visibility {
    /// Complete groups for chunk row `row`.
    pub fn groups(self, row: usize) -> usize {
        (self.first_pos + row + 1) / self.ratio
    }
}

/// Strides of score rows are multiples of this: the keys that one task scores, enough to outweigh waking a worker and
/// few enough to balance a single row.
pub const SCORE_STRIDE: usize = 256;

/// `sum_h weight_h * max(0, q_h . key)` for each visible key.
pub struct IndexScores<'a, B: Backend> {
    /// `[all rows, heads, width]`.
    pub q: &'a B::Buf,
    /// `[all rows, heads]`.
    pub head_weights: &'a B::Buf,
    /// `[keys, width]`.
    pub keys: &'a B::Buf,
    /// Rows of the chunk that are scored; the first of them is row 0 of the scores.
    pub rows: Range<usize>,
    pub heads: usize,
    pub width: usize,
    pub visible: Visibility,
    /// Factor of every score.
    pub scale: f32,
    /// Scores from one row to the next, a multiple of `SCORE_STRIDE`.
    pub stride: usize,
}

/// Best blocks of neighbouring keys; the newest block always counts as the best.
pub struct CandidateBlocks<'a, B: Backend> {
    /// `[rows, stride]`; `None` if every row sees at most `blocks_max` blocks.
    pub scores: Option<&'a B::Buf>,
    pub rows: Range<usize>,
    pub visible: Visibility,
    pub stride: usize,
    /// Keys in a block.
    pub block: usize,
    pub blocks_max: usize,
    /// Words of 32 bits of one row's mask.
    pub words: usize,
}

/// The `k` best keys of each row, lower index first among equals.
pub struct SelectRows<'a, B: Backend> {
    /// `[rows, stride]`; `None` if every row sees at most `k` keys.
    pub scores: Option<&'a B::Buf>,
    /// Keys outside these blocks are left out.
    pub mask: Option<&'a B::Ids>,
    pub rows: Range<usize>,
    pub visible: Visibility,
    pub stride: usize,
    pub k: usize,
    /// Keys in a block of the mask.
    pub block: usize,
    /// Words of 32 bits of one row's mask.
    pub words: usize,
}

/// Compressed rows of an attention.
pub struct Compressed<'a, B: Backend> {
    /// `[groups, width]`, keys and values alike.
    pub rows: &'a B::Buf,
    /// `[rows, k]`, -1 behind the last.
    pub selected: &'a B::Ids,
    pub k: usize,
}

/// One shared key = value row a token; all heads read it. The softmax also counts a sink logit a head.
pub struct Attention<'a, B: Backend> {
    /// `[rows, heads, width]`.
    pub q: &'a B::Buf,
    /// `[window_slots, width]`: position `p` is in slot `p mod window_slots`.
    pub window: &'a B::Buf,
    pub window_slots: usize,
    /// Positions that a token sees of the window, itself included.
    pub window_len: usize,
    pub compressed: Option<Compressed<'a, B>>,
    /// `[heads]`.
    pub sinks: &'a B::Buf,
    pub rows: usize,
    pub heads: usize,
    pub width: usize,
    pub first_pos: usize,
    pub scale: f32,
    /// Whether all values of window and compressed rows are BF16 values, as rounding to FP8 and FP4 leaves them. A backend with [`Sums::Fast`]
    /// computes with them as such, and would lose bits of others.
    pub keys_are_bf16: bool,
}

/// In which order a backend adds where it has a choice. The processor has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sums {
    /// As the processor: the same bits.
    Exact,
    /// As suits tensor cores: F32 products and sums in one fixed order of its own, no less exact.
    #[default]
    Fast,
}

/// `score = sqrt(softplus(logit))`; the bias takes part in the choice, not in the weights.
pub struct Route<'a, B: Backend> {
    /// `[rows, experts]`.
    pub logits: &'a B::Buf,
    /// `[experts]`.
    pub bias: &'a B::Buf,
    pub rows: usize,
    pub experts: usize,
    pub k: usize,
    /// Factor of the weights.
    pub scale: f32,
    /// Whether weights are divided by their sum.
    pub normalise: bool,
}

/// Weights of experts that are known without a choice: as those of [`Route`].
pub struct WeighExperts<'a, B: Backend> {
    /// `[rows, experts]`.
    pub logits: &'a B::Buf,
    /// `[rows, k]`.
    pub ids: &'a B::Ids,
    pub rows: usize,
    pub experts: usize,
    pub k: usize,
    /// Factor of the weights.
    pub scale: f32,
    /// Whether weights are divided by their sum.
    pub normalise: bool,
}

/// Moves rows named by `indices[range]`.
pub struct MoveRows<'a, B: Backend> {
    /// `[.., width]`.
    pub src: &'a B::Buf,
    pub indices: &'a B::Ids,
    pub range: Range<usize>,
    pub width: usize,
}

/// Clamped SwiGLU: the gate is clamped above only, the other factor on both sides.
pub struct SwiGlu<'a, B: Backend> {
    pub up: &'a B::Buf,
    pub values: usize,
    pub limit: f32,
}

/// One routed expert of a single row.
pub struct PlacedExpert<'w, B: Backend> {
    /// `[width, hidden]`.
    pub gate: B::MatView<'w>,
    /// `[width, hidden]`.
    pub up: B::MatView<'w>,
    /// `[hidden, width]`.
    pub down: B::MatView<'w>,
    /// Row of the outputs that is its.
    pub place: usize,
}

/// All products of some experts with one row: `down * swiglu(gate * x, up * x)` each.
pub struct ExpertsRow<'w, 'a, B: Backend> {
    /// `[hidden]`.
    pub x: &'a B::Buf,
    /// At least one, with matrices of the same types and shapes.
    pub experts: &'a [PlacedExpert<'w, B>],
    pub hidden: usize,
    /// Width of an expert.
    pub width: usize,
    pub limit: f32,
}

/// Where the products go.
pub struct ExpertsOut<'a, B: Backend> {
    /// `[width]` at least: what was in it is lost.
    pub gate: &'a mut B::Buf,
    /// `[width]` at least, likewise.
    pub up: &'a mut B::Buf,
    /// `[hidden]` at least, likewise.
    pub y: &'a mut B::Buf,
    /// `[places, hidden]`.
    pub outputs: &'a mut B::Buf,
}

/// One routed expert of the rows of a sweep.
pub struct SweptExpert<'w, B: Backend> {
    /// `[width, hidden]`.
    pub gate: B::MatView<'w>,
    /// `[width, hidden]`.
    pub up: B::MatView<'w>,
    /// `[hidden, width]`.
    pub down: B::MatView<'w>,
    /// Its assignments.
    pub assigned: Range<usize>,
}

/// Some experts on rows of their own: each adds `weight * (down * swiglu(gate * x, up * x))` to the sums of its rows.
pub struct ExpertsRows<'w, 'a, B: Backend> {
    /// `[rows, hidden]`.
    pub x: &'a B::Buf,
    /// `[assignments]`: the row of each; no expert has a row twice.
    pub rows: &'a B::Ids,
    /// Weights in the router's order.
    pub weights: &'a B::Buf,
    /// `[assignments]`: where the weight of each is.
    pub places: &'a B::Ids,
    /// In the order in which a row adds them; their assignments lie one behind the other.
    pub experts: &'a [SweptExpert<'w, B>],
    pub hidden: usize,
    /// Width of an expert.
    pub width: usize,
    pub limit: f32,
    /// Rows that the work memory holds.
    pub room: usize,
}

/// Work memory of [`ExpertsRows`]: what was in it is lost.
pub struct SweptWork<'a, B: Backend> {
    /// `[room, hidden]`.
    pub x: &'a mut B::Buf,
    /// `[room, width]`.
    pub gate: &'a mut B::Buf,
    /// `[room, width]`.
    pub up: &'a mut B::Buf,
    /// `[room, hidden]`.
    pub y: &'a mut B::Buf,
    /// `[room]`.
    pub weights: &'a mut B::Buf,
    /// `[room, hidden]`.
    pub before: &'a mut B::Buf,
    /// `[room, hidden]`.
    pub after: &'a mut B::Buf,
}

/// Sum of expert outputs.
pub struct CombineExperts<'a, B: Backend> {
    /// `[rows, k, width]`, summed in this order.
    pub outputs: &'a B::Buf,
    /// `[rows, k]`.
    pub weights: &'a B::Buf,
    /// `[rows, width]`.
    pub shared: &'a B::Buf,
    pub rows: usize,
    pub k: usize,
    pub width: usize,
}

/// The place of the largest value.
pub struct BestOf<'a, B: Backend> {
    /// `[count]`.
    pub values: &'a B::Buf,
    pub count: usize,
}

/// How a place is drawn from weights that follow values: each filter looks at what the one before left.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DrawRule {
    /// A weight is exp((value - largest) / temperature). Above 0.
    pub temperature: f32,
    /// Only this many of the largest values; 0 is off.
    pub top_k: usize,
    /// Only the largest values whose weights together reach this share of all; 1 is off.
    pub top_p: f32,
    /// Only values with at least this share of the largest weight; 0 is off.
    pub min_p: f32,
    /// Any number, at random: its share of 2^64 is the place among the weights laid end to end.
    pub number: u64,
}

/// A place drawn at random, larger values more often.
pub struct Draw<'a, B: Backend> {
    /// `[count]`.
    pub values: &'a B::Buf,
    pub count: usize,
    pub rule: DrawRule,
}

/// Decoding of n-gram rows: E4M3 codes, then an E8M0 scale for each 32 of them; all are numbers, and so are their products.
pub struct DecodeRows<'a, B: Backend> {
    /// `[rows, width + width / 32]` bytes in words of four, the last one filled up.
    pub bytes: &'a B::Ids,
    pub rows: usize,
    /// Values of a row, a multiple of 32.
    pub width: usize,
}

impl<B: Backend> DecodeRows<'_, B> {
    /// Words that the rows take.
    pub fn words(&self) -> usize {
        (self.rows * (self.width + self.width / 32)).div_ceil(4)
    }
}

/// Gate from the similarity of a stream with its key, then `stream += gate * value`.
pub struct EngramGate<'a, B: Backend> {
    /// `[rows, streams + 1, hidden]`: a key for each stream, then the value.
    pub keys_value: &'a B::Buf,
    /// `[streams, hidden]`.
    pub q_norm: &'a B::Buf,
    /// `[streams, hidden]`.
    pub k_norm: &'a B::Buf,
    pub rows: usize,
    pub stream_count: usize,
    pub hidden: usize,
    pub rms_eps: f32,
    /// Smallest magnitude under the square root.
    pub floor: f32,
}

/// Score of a router's logit (spec 3.9): `sqrt(softplus(logit))`, stable for large magnitudes.
pub fn router_score(logit: f32) -> f32 {
    // exp and log in F64, rounded once, as in all ops: devices agree then.
    let exp = f64::from(-logit.abs()).exp() as f32;
    (logit.max(0.0) + f64::from(exp).ln_1p() as f32).sqrt()
}
