//! Which layer makes, borrows and selects what (spec 1.2).
//! Never lists layer numbers: everything follows from the arrays of the file by the general rule of that section.
//! Surprising fact: most layers own no compressed rows and no selection; they read those of an earlier layer.

use crate::models::metadata::{ConfigError, Keys};

/// What one layer does besides window attention and experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LayerPlan {
    /// Tokens of a compressed row; 0 = window only.
    pub ratio: usize,
    /// Owner number of the compressed rows that this layer reads.
    pub owner: Option<usize>,
    /// Makes the compressed rows of `owner`.
    pub makes_rows: bool,
    /// Makes index keys for the rows that it makes.
    pub makes_keys: bool,
    /// Computes a selection, over the index keys of this owner.
    pub selects_by: Option<usize>,
    /// Its scores choose the candidate blocks.
    pub makes_candidates: bool,
    /// Its selection stays inside the candidate blocks.
    pub masked: bool,
    /// Number of its n-gram table.
    pub table: Option<usize>,
}

/// Plans of all layers, and the layer of each owner number.
pub struct Schedule {
    pub layers: Vec<LayerPlan>,
    pub owners: Vec<usize>,
}

/// Reads the arrays and derives the plans. `table_layers` are the layers with n-gram tables.
pub fn read(keys: &Keys<'_>, table_layers: &[usize]) -> Result<Schedule, ConfigError> {
    let count = keys.uint("num_hidden_layers", 1, 4096)?;
    let ratios = keys.uints("compress_ratios")?;
    if ratios.len() != count || ratios.iter().any(|r| *r > 2) {
        let reason = format!("one of 0, 1, 2 is needed for each of {count} layers");
        return Err(ConfigError::unusable(&keys.key("compress_ratios"), ratios, reason));
    }
    let kv_sources = layer_list(keys, "kv_source_layer_ids", count)?;
    let index_sources = layer_list(keys, "index_source_layer_ids", count)?;
    if let Some(layer) = table_layers.iter().find(|l| **l >= count) {
        return Err(ConfigError::unusable(&keys.key("engram.layer_ids"), layer, format!("there are {count} layers")));
    }
    let candidate_source = match ratios.iter().any(|r| *r > 0) {
        true => Some(keys.uint("candidate_source_layer_id", 0, count as u64 - 1)?),
        false => None,
    };
    if let Some(source) = candidate_source.filter(|s| !index_sources.contains(s)) {
        let key = keys.key("candidate_source_layer_id");
        return Err(ConfigError::unusable(&key, source, "is not in index_source_layer_ids"));
    }

    let owners = kv_sources.into_iter().filter(|l| ratios[*l] > 0).collect();
    let sources = Sources { keys, ratios, owners, index_sources, candidate_source };
    let plan = |layer: usize| {
        let table = table_layers.iter().position(|l| *l == layer);
        Ok(LayerPlan { table, ..sources.plan(layer)? })
    };
    let layers = (0..count).map(plan).collect::<Result<_, ConfigError>>()?;
    Ok(Schedule { layers, owners: sources.owners })
}

/// The arrays that the plans follow from.
struct Sources<'a> {
    keys: &'a Keys<'a>,
    ratios: Vec<u64>,
    /// Layers that make compressed rows.
    owners: Vec<usize>,
    /// Layers that compute a selection.
    index_sources: Vec<usize>,
    candidate_source: Option<usize>,
}

impl Sources<'_> {
    /// The general rule of spec 1.2, without the n-gram table.
    fn plan(&self, layer: usize) -> Result<LayerPlan, ConfigError> {
        let ratio = self.ratios[layer];
        if ratio == 0 {
            return Ok(LayerPlan::default());
        }
        let refuse = |key: &str, reason: String| ConfigError::unusable(&self.keys.key(key), layer, reason);
        let nobody = |key: &str, what: &str| refuse(key, format!("no layer up to this one makes {what}"));
        let latest = |list: &[usize]| list.iter().rposition(|l| *l <= layer);
        let has_keys = |owner: &usize| self.index_sources.contains(&self.owners[*owner]);
        let owner = latest(&self.owners).ok_or_else(|| nobody("kv_source_layer_ids", "compressed rows"))?;
        let selector = latest(&self.index_sources).ok_or_else(|| nobody("index_source_layer_ids", "a selection"))?;
        let keyed = (0..=owner).rev().find(has_keys).ok_or_else(|| nobody("index_source_layer_ids", "index keys"))?;
        let makes_rows = self.owners[owner] == layer;
        let selects = self.index_sources[selector] == layer;
        let candidates_before = self.candidate_source.filter(|source| selects && *source < layer);
        let lenders = [self.owners[owner], self.index_sources[selector], self.owners[keyed]];
        if let Some(lender) = lenders.into_iter().chain(candidates_before).find(|l| self.ratios[*l] != ratio) {
            return Err(refuse("compress_ratios", format!("it borrows from layer {lender}, which has another ratio")));
        }
        Ok(LayerPlan {
            ratio: ratio as usize,
            owner: Some(owner),
            makes_rows,
            makes_keys: makes_rows && has_keys(&owner),
            selects_by: selects.then_some(keyed),
            makes_candidates: selects && self.candidate_source == Some(layer),
            masked: candidates_before.is_some(),
            table: None,
        })
    }
}

/// A rising list of layer numbers.
fn layer_list(keys: &Keys<'_>, name: &str, count: usize) -> Result<Vec<usize>, ConfigError> {
    let list = keys.uints(name)?;
    if list.windows(2).any(|w| w[0] >= w[1]) || list.iter().any(|l| *l >= count as u64) {
        return Err(ConfigError::unusable(&keys.key(name), list, format!("must be rising and below {count}")));
    }
    Ok(list.into_iter().map(|l| l as usize).collect())
}
