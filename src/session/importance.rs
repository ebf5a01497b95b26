//! What the inputs of every matrix weigh, on average, while a model runs: mean squares, the statistics that coarse
//! quantisers go by. Owns the sums; never writes files and never knows an architecture (the model says which probe point
//! feeds which matrix). Surprising fact: sums are F64 and taken row by row in the order of the text, so neither threads
//! nor chunk width change a bit of the result.

use std::collections::{BTreeMap, HashMap};

use crate::models::probe::{Feed, MatrixInput, Point, Probe};

/// Why there are no statistics.
#[derive(Debug, thiserror::Error)]
pub enum ImportanceError {
    #[error("no input of {tensor} was seen; use a longer text")]
    Unseen { tensor: String },
    #[error("an input of {tensor} is not a finite number; the model file is damaged, check its hash")]
    NotFinite { tensor: String },
}

/// By tensor name: shape (`[columns]` or `[experts, columns]`) and mean squares.
pub type MeanSquares = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Sums of squares by column.
#[derive(Clone, Debug)]
struct Sums {
    rows: u64,
    squares: Vec<f64>,
}

impl Sums {
    fn new(width: usize) -> Self {
        Self { rows: 0, squares: vec![0.0; width] }
    }

    fn is_empty(&self) -> bool {
        self.rows == 0
    }

    fn add(&mut self, row: &[f32]) {
        self.rows += 1;
        self.squares.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v) * f64::from(*v));
    }

    fn join(&mut self, other: &Self) {
        self.rows += other.rows;
        self.squares.iter_mut().zip(&other.squares).for_each(|(sum, v)| *sum += v);
    }

    fn means(&self) -> impl Iterator<Item = f32> {
        self.squares.iter().map(|sum| (sum / self.rows as f64) as f32)
    }
}

/// A probe that keeps sums for every matrix of a model.
pub struct Collector {
    inputs: Vec<MatrixInput>,
    experts: usize,
    /// One `Sums` for a plain matrix, one an expert for routed ones; matrices that read the same rows share them.
    sums: HashMap<(usize, Feed), Vec<Sums>>,
    /// Feeds of each shown (point, layer).
    by_point: HashMap<(Point, usize), Vec<Feed>>,
    /// Rows that wait for their routes, by layer.
    unrouted: HashMap<usize, Vec<(Point, Vec<f32>)>>,
}

impl Collector {
    /// A collector for the matrices of a model with `experts` routed experts a layer.
    pub fn new(inputs: Vec<MatrixInput>, experts: usize) -> Self {
        let mut sums = HashMap::new();
        let mut by_point: HashMap<_, Vec<Feed>> = HashMap::new();
        for input in &inputs {
            let count = if matches!(input.feed, Feed::Rows { .. }) { 1 } else { experts };
            if sums.insert((input.layer, input.feed), vec![Sums::new(input.width); count]).is_some() {
                continue;
            }
            if let Feed::Rows { point, .. } | Feed::Routed(point) = input.feed {
                by_point.entry((point, input.layer)).or_default().push(input.feed);
            }
        }
        Self { inputs, experts, sums, by_point, unrouted: HashMap::new() }
    }

    /// Mean squares of all matrices. An expert that no row was routed to gets the mean over its layer's assignments.
    ///
    /// # Errors
    /// `Unseen` when nothing ran, `NotFinite` when the model computed nonsense.
    pub fn finish(self) -> Result<MeanSquares, ImportanceError> {
        let mut all = BTreeMap::new();
        for input in &self.inputs {
            let tensor = || input.tensor.clone();
            let sums = &self.sums[&(input.layer, input.feed)];
            let mut whole = Sums::new(input.width);
            sums.iter().for_each(|part| whole.join(part));
            if whole.is_empty() {
                return Err(ImportanceError::Unseen { tensor: tensor() });
            }
            let known = sums.iter().map(|part| if part.is_empty() { &whole } else { part });
            let values: Vec<f32> = known.flat_map(Sums::means).collect();
            if values.iter().any(|v| !v.is_finite()) {
                return Err(ImportanceError::NotFinite { tensor: tensor() });
            }
            let is_routed = !matches!(input.feed, Feed::Rows { .. });
            let shape = if is_routed { vec![self.experts, input.width] } else { vec![input.width] };
            all.insert(tensor(), (shape, values));
        }
        Ok(all)
    }

    /// (layer, expert) pairs that no row was routed to, of all.
    pub fn unseen_experts(&self) -> (usize, usize) {
        let mids = self.sums.iter().filter(|((_, feed), _)| *feed == Feed::ExpertMid).flat_map(|(_, sums)| sums);
        mids.fold((0, 0), |(unseen, all), sums| (unseen + usize::from(sums.is_empty()), all + 1))
    }
}

impl Probe for Collector {
    fn wants(&self, point: Point) -> bool {
        point == Point::RouterIds || self.by_point.keys().any(|(known, _)| *known == point)
    }

    fn values(&mut self, point: Point, layer: usize, _first_pos: usize, width: usize, values: &[f32]) {
        for feed in self.by_point.get(&(point, layer)).into_iter().flatten() {
            match feed {
                Feed::Rows { slices, .. } => {
                    let sums = &mut self.sums.get_mut(&(layer, *feed)).expect("made with the index")[0];
                    values.chunks_exact(width / slices).for_each(|slice| sums.add(slice));
                }
                _ => self.unrouted.entry(layer).or_default().push((point, values.to_vec())),
            }
        }
    }

    fn ids(&mut self, point: Point, layer: usize, _first_pos: usize, k: usize, ids: &[i32]) {
        if point != Point::RouterIds {
            return;
        }
        for (point, values) in self.unrouted.remove(&layer).unwrap_or_default() {
            let sums = self.sums.get_mut(&(layer, Feed::Routed(point))).expect("kept for routed feeds only");
            let width = values.len() / (ids.len() / k);
            for (row, ids) in values.chunks_exact(width).zip(ids.chunks_exact(k)) {
                ids.iter().for_each(|expert| sums[*expert as usize].add(row));
            }
        }
    }

    fn wants_expert_mid(&self) -> bool {
        true
    }

    fn expert_mid(&mut self, layer: usize, expert: usize, width: usize, values: &[f32]) {
        if let Some(sums) = self.sums.get_mut(&(layer, Feed::ExpertMid)) {
            values.chunks_exact(width).for_each(|row| sums[expert].add(row));
        }
    }
}
