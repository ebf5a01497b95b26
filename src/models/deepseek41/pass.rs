//! A chunk of this architecture on its way through the layers: what it begins with (spec 3.1) and what later tokens depend on.
//! Never decides the order of a layer's steps (3.3): `models::blocks::pass` does. Surprising fact: rows whose own outputs nobody needs are
//! not mixed, since their streams end here.

use super::architecture::V41;
use crate::backend::{Backend, BackendError};
use crate::models::blocks::pass;

/// What stays fixed during a pass.
pub type Ctx<'a, B> = pass::Ctx<'a, B, V41>;
/// A chunk under way.
pub type Pass<'a, B> = pass::Pass<'a, B, V41>;

impl<B: Backend> Pass<'_, B> {
    /// Spec 3.1: the carried weights start as (1, 0, 0, ..); the streams are all the token's embedding.
    pub fn start_carried(&mut self) -> Result<(), BackendError> {
        let (ctx, streams) = (self.ctx, self.ctx.config.streams);
        let first: Vec<f32> = (0..ctx.rows * streams).map(|i| if i % streams == 0 { 1.0 } else { 0.0 }).collect();
        ctx.backend.upload(&first, &mut self.own.carried, 0)
    }

    /// What later tokens depend on, for rows whose own outputs nobody needs.
    pub fn remember(&mut self, layer: usize, has_window: bool) -> Result<(), BackendError> {
        self.collapse_and_norm(&self.ctx.layer(layer).attention.norm)?;
        if has_window {
            self.project_kv(layer)?;
            self.keep_window(layer)?;
        }
        self.compress(layer)
    }
}
