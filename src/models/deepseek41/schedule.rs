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

    let owners: Vec<usize> = kv_sources.iter().copied().filter(|l| ratios[*l] > 0).collect();
    let latest = |list: &[usize], layer: usize| list.iter().rposition(|l| *l <= layer);
    let mut layers = Vec::with_capacity(count);
    for layer in 0..count {
        let mut plan = LayerPlan {
            ratio: ratios[layer] as usize,
            table: table_layers.iter().position(|l| *l == layer),
            ..LayerPlan::default()
        };
        if plan.ratio > 0 {
            let refuse = |key: &str, reason: String| ConfigError::unusable(&keys.key(key), layer, reason);
            let owner = latest(&owners, layer)
                .ok_or_else(|| refuse("kv_source_layer_ids", "no layer up to this one makes compressed rows".into()))?;
            let selector = latest(&index_sources, layer)
                .ok_or_else(|| refuse("index_source_layer_ids", "no layer up to this one makes a selection".into()))?;
            let keyed = (0..=owner)
                .rev()
                .find(|o| index_sources.contains(&owners[*o]))
                .ok_or_else(|| refuse("index_source_layer_ids", "no layer up to this one makes index keys".into()))?;
            for source in [owners[owner], index_sources[selector], owners[keyed]] {
                if ratios[source] != ratios[layer] {
                    let reason = format!("it borrows from layer {source}, which has another ratio");
                    return Err(refuse("compress_ratios", reason));
                }
            }
            plan.owner = Some(owner);
            plan.makes_rows = owners[owner] == layer;
            plan.makes_keys = plan.makes_rows && index_sources.contains(&layer);
            let selects = index_sources[selector] == layer;
            plan.selects_by = selects.then_some(keyed);
            plan.makes_candidates = selects && candidate_source == Some(layer);
            plan.masked = selects && candidate_source.is_some_and(|source| source < layer);
            if plan.masked && candidate_source.is_some_and(|source| ratios[source] != ratios[layer]) {
                return Err(refuse("candidate_source_layer_id", "candidates of another ratio do not fit".into()));
            }
        }
        layers.push(plan);
    }
    Ok(Schedule { layers, owners })
}

/// A rising list of layer numbers.
fn layer_list(keys: &Keys<'_>, name: &str, count: usize) -> Result<Vec<usize>, ConfigError> {
    let list = keys.uints(name)?;
    if list.windows(2).any(|w| w[0] >= w[1]) || list.iter().any(|l| *l >= count as u64) {
        return Err(ConfigError::unusable(&keys.key(name), list, format!("must be rising and below {count}")));
    }
    Ok(list.into_iter().map(|l| l as usize).collect())
}
