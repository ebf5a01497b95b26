//! What the rows of a sweep carry from one step of a layer to the next: residual streams, mixing weights, selections, expert sums.
//! Owns the buffers of all rows; never computes. Surprising fact: outputs of single experts are not among them. They are added up as they
//! are made, which is what lets thousands of rows share one read of an expert.

use super::config::Config;
use crate::backend::{Backend, BackendError};
use crate::models::RunnerOptions;

/// Declares the buffers, each with its values a row.
macro_rules! carry {
    ($c:ident, $words:ident; bufs { $($(#[$doc:meta])* $buf:ident: $width:expr,)* } ids { $($(#[$id_doc:meta])* $ids:ident: $id_width:expr,)* }) => {
        /// Rows of a sweep.
        pub struct Carry<B: Backend> {
            $($(#[$doc])* pub $buf: B::Buf,)*
            $($(#[$id_doc])* pub $ids: B::Ids,)*
            /// Words of one row of `candidates`.
            pub words: usize,
        }

        impl<B: Backend> Carry<B> {
            /// Room for the widest sweep of `options`.
            pub fn new($c: &Config, options: &RunnerOptions, backend: &B) -> Result<Self, BackendError> {
                let ($words, rows) = (super::workspace::mask_words($c, options), options.sweep_rows());
                Ok(Self {
                    $($buf: backend.alloc(concat!("sweep ", stringify!($buf)), rows * $width)?,)*
                    $($ids: backend.alloc_ids(concat!("sweep ", stringify!($ids)), rows * $id_width)?,)*
                    words: $words,
                })
            }

            /// Bytes that the buffers really take.
            pub fn allocated_bytes(&self, backend: &B) -> u64 {
                let values = 0 $(+ backend.len(&self.$buf))* $(+ backend.len_ids(&self.$ids))*;
                4 * values as u64
            }
        }

        /// Bytes of one row of a sweep at these options.
        pub fn row_bytes($c: &Config, options: &RunnerOptions) -> u64 {
            let $words = super::workspace::mask_words($c, options);
            let values: usize = 0 $(+ $width)* $(+ $id_width)*;
            4 * values as u64
        }
    };
}

carry! {
    c, words;
    bufs {
        /// `[rows, streams, hidden]`: the residual state.
        streams: c.streams * c.hidden,
        /// `[rows, streams]`: collapse weights for the next sublayer.
        carried: c.streams,
        /// `[rows, streams]`: collapse weights made by the expert sublayer under way.
        pre: c.streams,
        /// `[rows, streams]`.
        post: c.streams,
        /// `[rows, streams, streams]`.
        comb: c.streams * c.streams,
        /// `[rows, hidden]`: input of the expert sublayer.
        x: c.hidden,
        /// `[rows, hidden]`: sum of the experts so far.
        sum: c.hidden,
        /// `[rows, k]`: weights in router order.
        router_weights: c.experts_per_token,
    }
    ids {
        /// `[rows, index_top_k]`: latest selection.
        selected: c.index_top_k,
        /// `[rows, words]`: candidate blocks.
        candidates: words,
        /// `[rows * k]`: source rows, grouped by expert.
        group_rows: c.experts_per_token,
        /// `[rows * k]`: places of their weights, grouped by expert.
        group_places: c.experts_per_token,
    }
}
