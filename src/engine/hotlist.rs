//! Which experts of a model file are popular, learned over runs: the file of `--save-hotlist` and `--hotlist`.
//! Owns the format, its checks and the fading of old runs. Never reads an expert. Surprising fact: a run of few tokens hardly moves the
//! list of a long one, because old counts fade by the tokens that came after them, not by the run.

use std::path::Path;

use cache_policy::ClassShape;
use serde::{Deserialize, Serialize};

use crate::engine::options::{EngineOptions, Preload};
use crate::engine::prepare::Prepared;
use crate::engine::{Engine, EngineError};
use crate::storage::expert_cache::CacheView;
use crate::storage::identity::ModelIdentity;
use crate::units::{ExpertIdx, ExpertKey, LayerIdx};

const FORMAT: &str = "ds4-hotlist";
const VERSION: u64 = 1;
/// Tokens after which a count has half its weight: some long conversations, so that yesterday's subject does not rule today's cache.
const HALF_LIFE_TOKENS: f64 = 20_000.0;
/// Longest file that is read; the largest model's list has a quarter of a MiB.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Why a hotlist cannot be used. Every message names the file.
#[derive(Debug, thiserror::Error)]
pub enum HotlistError {
    #[error("cannot read the hotlist {path}: {error}; make one with --save-hotlist {path}")]
    File { path: String, error: std::io::Error },
    #[error("{path} is not a hotlist ({what}); make one with --save-hotlist under another name")]
    NotAHotlist { path: String, what: String },
    #[error(
        "the hotlist {path} has version {found}, this program reads version {VERSION}; make a new one with --save-hotlist"
    )]
    Version { path: String, found: u64 },
    #[error(
        "the hotlist {path} belongs to another model file ({found}, this file is {expected}); name the one learned with this file, or \
         learn a new one with --save-hotlist under another name"
    )]
    OtherModel { path: String, found: String, expected: String },
}

/// Weights of one layer's experts.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct LayerList {
    layer: u16,
    /// `[experts]`: faded counts of requests.
    weights: Vec<f64>,
}

/// The popularity of all experts of one model file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Hotlist {
    format: String,
    version: u64,
    /// Identity of the model file, in hexadecimal digits.
    model: String,
    /// Tokens that the weights are from, faded alike.
    tokens: f64,
    layers: Vec<LayerList>,
}

impl Hotlist {
    /// What `uses` (requests by layer and expert) say after a run of `tokens` tokens.
    pub fn learned(model: ModelIdentity, tokens: u64, uses: impl IntoIterator<Item = (LayerIdx, Vec<u32>)>) -> Self {
        let list = |(layer, uses): (LayerIdx, Vec<u32>)| LayerList {
            layer: layer.0,
            weights: uses.into_iter().map(f64::from).collect(),
        };
        let layers = uses.into_iter().map(list).collect();
        Self { format: FORMAT.into(), version: VERSION, model: model.to_string(), tokens: tokens as f64, layers }
    }

    /// Adds an older list of the same model, faded by this one's tokens.
    pub fn add_older(&mut self, older: &Self) {
        let fade = (-self.tokens / HALF_LIFE_TOKENS).exp2();
        self.tokens += fade * older.tokens;
        for (list, old) in self.layers.iter_mut().zip(&older.layers) {
            list.weights.iter_mut().zip(&old.weights).for_each(|(weight, old)| *weight += fade * old);
        }
    }

    /// Reads the list at `path`, which must be of the model with this identity and these experts by layer.
    ///
    /// # Errors
    /// A file that cannot be read, is no hotlist, or is another model's.
    pub fn read(path: &Path, model: ModelIdentity, experts: &[(LayerIdx, u16)]) -> Result<Self, HotlistError> {
        let shown = || path.display().to_string();
        let failed = |error| HotlistError::File { path: shown(), error };
        let bad = |what: String| HotlistError::NotAHotlist { path: shown(), what };
        let found = std::fs::metadata(path).map_err(failed)?;
        if !found.is_file() || found.len() > FILE_BYTES_MAX {
            return Err(bad("it is no regular file, or larger than any".into()));
        }
        let bytes = std::fs::read(path).map_err(failed)?;
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let head: Head = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        if head.format != FORMAT {
            return Err(bad(format!("its format is {:?}", head.format.chars().take(40).collect::<String>())));
        }
        if head.version != VERSION {
            return Err(HotlistError::Version { path: shown(), found: head.version });
        }
        let list: Self = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        let expected = model.to_string();
        if list.model != expected {
            // Eight bytes tell files apart for a reader's eye.
            let short = |digits: &str| digits.chars().take(16).collect();
            return Err(HotlistError::OtherModel {
                path: shown(),
                found: short(&list.model),
                expected: short(&expected),
            });
        }
        let fits =
            list.layers.len() == experts.len()
                && list.layers.iter().zip(experts).all(|(list, &(layer, experts))| {
                    list.layer == layer.0 && list.weights.len() == usize::from(experts)
                });
        let is_sound = |weight: &f64| weight.is_finite() && *weight >= 0.0;
        if !fits || !is_sound(&list.tokens) || !list.layers.iter().flat_map(|l| &l.weights).all(is_sound) {
            return Err(bad("its lists do not fit the model".into()));
        }
        Ok(list)
    }

    /// Up to `count` experts, most popular first, no more of a size class than it has slots. Unused ones come last, in file order.
    pub fn best(&self, shapes: &[ClassShape], count: u64) -> Vec<ExpertKey> {
        let mut all: Vec<(f64, ExpertKey)> = Vec::new();
        for list in &self.layers {
            let key = |at: usize| ExpertKey { layer: LayerIdx(list.layer), expert: ExpertIdx(at as u16) };
            all.extend(list.weights.iter().enumerate().map(|(at, &weight)| (weight, key(at))));
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut room: Vec<usize> = shapes.iter().map(|s| s.slots).collect();
        let class = |key: ExpertKey| shapes.iter().position(|s| s.layers.iter().any(|l| l.0 == key.layer));
        let classes: Vec<Option<usize>> = self.layers.iter().map(|l| class(ExpertKey::new(l.layer, 0))).collect();
        let mut take = |key: &ExpertKey| {
            let at = self.layers.partition_point(|l| l.layer < key.layer.0);
            let Some(class) = classes[at].filter(|&c| room[c] > 0) else { return false };
            room[class] -= 1;
            true
        };
        all.into_iter().map(|(_, key)| key).filter(|key| take(key)).take(count as usize).collect()
    }
}

/// The list to preload by and the older one at the place to save to, checked before anything large is read.
///
/// # Errors
/// Lists that cannot be used with this model.
pub(super) fn read_lists(
    options: &EngineOptions,
    prepared: &Prepared,
) -> Result<(Option<Hotlist>, Option<Hotlist>), EngineError> {
    let (hotlist, save) = (options.hotlist.as_deref(), options.save_hotlist.as_deref());
    if !options.is_streaming || (hotlist.is_none() && save.is_none()) {
        return Ok((None, None));
    }
    let cannot = |error| HotlistError::File { path: prepared.file.path().display().to_string(), error };
    let identity = prepared.identity().map_err(cannot)?;
    let experts: Vec<_> = prepared.layout.experts.iter().map(|l| (l.layer, l.experts)).collect();
    let read = |path: &Path| Hotlist::read(path, identity, &experts);
    // A cold start has no use for a list; what is wrong with it is told all the same.
    let list = hotlist.map(read).transpose()?.filter(|_| options.preload != Preload::Cold);
    let older = save.filter(|path| path.exists()).map(read).transpose()?;
    Ok((list, older))
}

impl Engine {
    /// The popularity of this run's experts, merged with the older list of the place to save to; `None` when nothing is streamed.
    ///
    /// # Errors
    /// A model file that can no longer be read.
    pub fn learned_hotlist(&self) -> std::io::Result<Option<Hotlist>> {
        let Some(cache) = self.cache() else { return Ok(None) };
        let mut view = CacheView::default();
        cache.look(&mut view);
        let uses = view.layers().into_iter().map(|l| (LayerIdx(l.layer), l.uses));
        let mut list = Hotlist::learned(self.identity()?, self.passes.tokens(), uses);
        if let Some(older) = &self.older_hotlist {
            list.add_older(older);
        }
        Ok(Some(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: ModelIdentity = ModelIdentity([7; 32]);
    const EXPERTS: [(LayerIdx, u16); 2] = [(LayerIdx(0), 3), (LayerIdx(2), 2)];

    fn learned(tokens: u64, uses: [[u32; 3]; 1], more: [u32; 2]) -> Hotlist {
        Hotlist::learned(MODEL, tokens, [(LayerIdx(0), uses[0].to_vec()), (LayerIdx(2), more.to_vec())])
    }

    #[test]
    fn the_most_popular_come_first_and_classes_have_their_slots() {
        let list = learned(10, [[1, 9, 0]], [8, 2]);
        let shapes = [
            ClassShape { layers: vec![(LayerIdx(0), 3)], slots: 2 },
            ClassShape { layers: vec![(LayerIdx(2), 2)], slots: 1 },
        ];
        let key = ExpertKey::new;
        assert_eq!(list.best(&shapes, 9), [key(0, 1), key(2, 0), key(0, 0)]);
        assert_eq!(list.best(&shapes, 2), [key(0, 1), key(2, 0)]);
    }

    #[test]
    fn older_runs_fade_by_tokens() {
        let old = learned(100, [[100, 0, 0]], [0, 50]);
        let mut short = learned(1, [[0, 1, 0]], [0, 0]);
        short.add_older(&old);
        assert!(short.layers[0].weights[0] > 99.9 && short.layers[0].weights[1] == 1.0, "{short:?}");
        let mut long = learned(HALF_LIFE_TOKENS as u64, [[0, 1, 0]], [0, 0]);
        long.add_older(&old);
        assert_eq!((long.layers[0].weights[0], long.layers[1].weights[1]), (50.0, 25.0));
    }

    #[test]
    fn bad_files_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hot");
        let sound = learned(10, [[1, 9, 0]], [8, 2]);
        let text = serde_json::to_string(&sound).unwrap();
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Hotlist::read(&path, MODEL, &EXPERTS)
        };
        assert_eq!(read(&text).unwrap(), sound);
        for (change, part) in [
            (text.replace("ds4-hotlist", "other"), "its format is"),
            (text.replace("\"version\":1", "\"version\":9"), "version 9"),
            (text.replace("0707", "0808"), "another model file (0808"),
            (text.replace("[1.0,", "["), "do not fit"),
            (text.replace("[1.0,", "[-1.0,"), "do not fit"),
            (text[..text.len() / 2].to_owned(), "not a hotlist"),
            (String::new(), "not a hotlist"),
        ] {
            let error = read(&change).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("hot"), "{error}");
        }
        assert!(matches!(Hotlist::read(folder.path(), MODEL, &EXPERTS), Err(HotlistError::NotAHotlist { .. })));
        let missing = Hotlist::read(&folder.path().join("none"), MODEL, &EXPERTS).unwrap_err();
        assert!(matches!(missing, HotlistError::File { .. }), "{missing}");
    }
}
