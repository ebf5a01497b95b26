//! A window into a running forward pass, for tests, route traces and the collection of quantisation statistics.
//! Never changes a result. Surprising fact: without a probe nothing is copied out, so it costs nothing when absent.

/// Where in the pass a probe looks. Widths are given with the values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Point {
    /// `[streams, hidden]` after the layer.
    Streams,
    /// `[streams]` collapse weights that the layer hands on.
    PreMix,
    /// `[hidden]` attention output after its last projection.
    AttentionOut,
    /// `[hidden]` experts and shared expert.
    MlpOut,
    /// `[k]` ids, by falling biased score.
    RouterIds,
    /// `[k]` in the order of `RouterIds`.
    RouterWeights,
    /// `[k]` ids of selected compressed rows, rising, -1 behind the last.
    Selected,
    /// `[words]` ids: candidate blocks, one bit each.
    Candidates,
    /// `[columns]` ids of n-gram rows, by table layer.
    EngramRows,
    /// `[columns, width]` decoded n-gram rows.
    EngramEmbedding,
    /// `[streams]`.
    EngramGate,
    /// `[streams, hidden]`: input of the attention sublayer's mixing matrix.
    AttentionMixIn,
    /// `[streams, hidden]`: input of the expert sublayer's mixing matrix.
    MlpMixIn,
    /// Input of the layer's query, key and compressor matrices.
    AttentionIn,
    /// Input of the index key matrix: one row for each group that the pass completes, from the first group's position on.
    IndexKeyIn,
    /// Input of the second query matrix and the index query matrix.
    QueryLatent,
    /// Input of the first output matrix, all heads.
    HeadsOut,
    /// Input of the second output matrix.
    GroupsOut,
    /// Input of the router and of all experts' first matrices.
    MlpIn,
    /// Input of the shared expert's last matrix.
    SharedMid,
    /// `[streams, hidden]`: input of the output head's mixing matrix.
    HeadMixIn,
    /// Input of the output head.
    HeadIn,
}

/// How rows reach a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Feed {
    /// Every row of the point; a row is cut into equal slices and each runs through its own part of the outputs.
    Rows { point: Point, slices: usize },
    /// Rows of the point, each at the experts that `RouterIds` names for it.
    Routed(Point),
    /// What `expert_mid` shows.
    ExpertMid,
}

/// A matrix of the model file and what it is multiplied with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MatrixInput {
    /// Name in the file.
    pub tensor: String,
    /// The layer that the probe is told.
    pub layer: usize,
    pub feed: Feed,
    /// Columns of the matrix: width of a slice.
    pub width: usize,
}

/// Receives what it wants to see, one call at a time.
pub trait Probe: Send {
    /// Whether values of `point` are to be handed out.
    fn wants(&self, point: Point) -> bool;

    /// Rows from position `first_pos` on: `values = [rows, width]`.
    fn values(&mut self, point: Point, layer: usize, first_pos: usize, width: usize, values: &[f32]) {
        let _ = (point, layer, first_pos, width, values);
    }

    /// As `values`, for ids.
    fn ids(&mut self, point: Point, layer: usize, first_pos: usize, width: usize, ids: &[i32]) {
        let _ = (point, layer, first_pos, width, ids);
    }

    /// Whether `expert_mid` is to be called.
    fn wants_expert_mid(&self) -> bool {
        false
    }

    /// Inputs of one routed expert's last matrix: `values = [rows, width]`.
    fn expert_mid(&mut self, layer: usize, expert: usize, width: usize, values: &[f32]) {
        let _ = (layer, expert, width, values);
    }
}
