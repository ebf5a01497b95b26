//! Reads routing archives (numpy npz) for the examples. Owns the array names. Never used by the crate itself.
//! Surprising fact: routes of a token lie together, all layers after each other, as decode asks for them.

use std::error::Error;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use cache_policy::{ClassShape, ExpertIdx, LayerIdx};
use npyz::npz::NpzArchive;

/// Shape and values of one array of the archive.
fn array<T: npyz::Deserialize>(
    npz: &mut NpzArchive<BufReader<File>>,
    name: &str,
) -> Result<(Vec<usize>, Vec<T>), Box<dyn Error>> {
    let array = npz.by_name(name)?.ok_or_else(|| format!("the archive has no array {name}"))?;
    let shape = array.shape().iter().map(|&n| n as usize).collect();
    Ok((shape, array.into_vec()?))
}

/// Routes of several texts through one model.
pub struct Routes {
    pub layers: usize,
    pub top_k: usize,
    pub experts: u16,
    pub sessions: usize,
    /// Tokens of each session.
    pub tokens: usize,
    /// Prompt tokens of each session.
    pub prefill: Vec<usize>,
    /// [sessions, tokens, layers, top_k]
    pub routes: Vec<ExpertIdx>,
    /// [sessions, tokens]; id of the token whose routes these are.
    pub ids: Vec<u32>,
}

impl Routes {
    pub fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let mut npz = NpzArchive::open(path)?;
        let (shape, routes) = array::<u16>(&mut npz, "experts")?;
        let &[sessions, tokens, layers, top_k] = shape.as_slice() else {
            return Err("experts must be [S, T, L, k]".into());
        };
        let routes = routes.into_iter().map(ExpertIdx).collect();
        let ids = array::<u16>(&mut npz, "tokens")?.1;
        let ids = ids.chunks_exact(tokens + 1).flat_map(|s| s[..tokens].iter().map(|&t| u32::from(t))).collect();
        let prefill = array::<i32>(&mut npz, "prefill")?.1.into_iter().map(|p| p as usize).collect();
        let experts = u16::try_from(array::<i32>(&mut npz, "n_experts")?.1[0])?;
        Ok(Self { layers, top_k, experts, sessions, tokens, prefill, routes, ids })
    }

    /// One size class over all layers.
    pub fn class(&self, slots: usize) -> ClassShape {
        ClassShape { layers: (0..self.layers as u16).map(|l| (LayerIdx(l), self.experts)).collect(), slots }
    }

    pub fn experts_total(&self) -> usize {
        self.layers * usize::from(self.experts)
    }

    pub fn uses_per_token(&self) -> usize {
        self.layers * self.top_k
    }

    /// Routes and id of token `at`, counted over all sessions.
    pub fn token(&self, at: usize) -> (&[ExpertIdx], u32) {
        let n = self.uses_per_token();
        (&self.routes[at * n..(at + 1) * n], self.ids[at])
    }

    /// The requests of tokens `range` in order.
    pub fn requests(&self, range: std::ops::Range<usize>) -> impl Iterator<Item = (LayerIdx, &[ExpertIdx])> {
        let layers = self.layers;
        let n = self.uses_per_token();
        let routes = &self.routes[range.start * n..range.end * n];
        routes.chunks_exact(self.top_k).enumerate().map(move |(i, ids)| (LayerIdx((i % layers) as u16), ids))
    }
}
