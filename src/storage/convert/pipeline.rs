//! Plans in, file out: chooses types, checks the layout, then reads, encodes and appends piece by piece.
//! Owns the order of work and the exactness checks; never keeps more than one piece in memory.
//! Surprising fact: progress counts output bytes, which is what the drive and the encoders are both slow at.

use std::ops::{ControlFlow, Range};

use rayon::prelude::*;

use super::Options;
use super::error::ConvertError;
use super::importance::Importance;
use super::part::{BadValue, Loaded, TensorPlan};
use crate::quant::{QuantError, QuantType, quantize_row};
use crate::storage::gguf::{GgufWriter, Metadata, TensorSpec};
use crate::storage::layout::Layout;

/// Told (bytes done, bytes in all) after every piece; `Break` stops the work and leaves no file.
pub type Watch<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// Values of one piece: 64 MiB as f32 when decoded at once, but rows are decoded one by one.
const PIECE_VALUES: u64 = 16 << 20;

/// Rows that one thread takes at least: n-gram rows are 264 bytes.
const ROWS_MIN: usize = 16;

/// What was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    pub tensors: usize,
    /// Length of the file.
    pub bytes: u64,
    /// Checkpoint tensors outside the text model (draft stages, vision), not converted.
    pub left_out: usize,
    /// Tensors encoded with an importance vector.
    pub with_importance: usize,
}

/// Writes `plans` in their order.
pub(super) fn write(
    metadata: Metadata,
    plans: Vec<TensorPlan>,
    options: &Options,
    watch: &mut Watch,
) -> Result<Summary, ConvertError> {
    let choose = |plan: &TensorPlan| {
        let ty = options.recipe.choose(&plan.name, plan.class, plan.columns(), plan.parts[0].native())?;
        Ok(TensorSpec { name: plan.name.clone(), ty, dims: plan.dims.clone() })
    };
    let specs = plans.iter().map(choose).collect::<Result<Vec<_>, ConvertError>>()?;
    let writer = GgufWriter::new(&metadata, &specs)?;
    Layout::from_gguf(writer.directory())?;
    if let Some(importance) = options.importance {
        importance.check(&plans)?;
    }
    let total = writer.directory().file_len();
    let mut summary = Summary { tensors: plans.len(), bytes: total, ..Summary::default() };
    let mut done = 0u64;
    let mut output = writer.create(options.output, options.force)?;
    for (plan, spec) in plans.iter().zip(&specs) {
        output.begin(&plan.name)?;
        summary.with_importance += usize::from(options.importance.is_some_and(|i| i.has(&plan.name)));
        let rows = plan.part_rows();
        let step = (PIECE_VALUES / plan.columns()).max(1);
        for part in 0..plan.parts.len() {
            let mut start = 0;
            while start < rows {
                let range = start..rows.min(start + step);
                start = range.end;
                let bytes = encode(plan, part, range, spec.ty, options.importance)?;
                output.append(&bytes)?;
                done += bytes.len() as u64;
                if watch(done, total).is_break() {
                    return Err(ConvertError::Stopped);
                }
            }
        }
    }
    output.finish()?;
    Ok(summary)
}

/// The bytes of `rows` of one part in type `ty`.
fn encode(
    plan: &TensorPlan,
    part: usize,
    rows: Range<u64>,
    ty: QuantType,
    importance: Option<&Importance>,
) -> Result<Vec<u8>, ConvertError> {
    let columns = plan.columns();
    let source = &plan.parts[part];
    let first_row = part as u64 * plan.part_rows() + rows.start;
    let count = (rows.end - rows.start) as usize;
    let loaded = source.load(columns, rows)?;
    let row_bytes = ty.row_bytes(columns).expect("the recipe chose a type that fits") as usize;
    let job = RowJob {
        loaded: &loaded,
        ty,
        is_exact: ty == source.native(),
        importance: importance.and_then(|i| i.of_part(&plan.name, part)),
    };
    let mut out = vec![0u8; count * row_bytes];
    let encode_row = |values: &mut Vec<f32>, (i, out): (usize, &mut [u8])| {
        job.run(i, values, out).map_err(|fault| {
            let (tensor, row) = (plan.name.clone(), first_row + i as u64);
            match fault {
                Fault::Value(BadValue { column, value, problem }) => {
                    ConvertError::Value { tensor, row, column: column as u64, value, problem }
                }
                Fault::Codec(source) => ConvertError::Codec { tensor, row, source },
            }
        })
    };
    out.par_chunks_exact_mut(row_bytes)
        .enumerate()
        .with_min_len(ROWS_MIN)
        .try_for_each_init(|| vec![0f32; columns as usize], encode_row)?;
    Ok(out)
}

enum Fault {
    Value(BadValue),
    Codec(QuantError),
}

/// What is the same for all rows of a piece.
struct RowJob<'a> {
    loaded: &'a Loaded,
    ty: QuantType,
    /// The target claims to hold the source's values exactly.
    is_exact: bool,
    importance: Option<&'a [f32]>,
}

impl RowJob<'_> {
    fn run(&self, i: usize, values: &mut [f32], out: &mut [u8]) -> Result<(), Fault> {
        if self.loaded.move_row(i, self.ty, out).map_err(Fault::Value)? {
            return Ok(());
        }
        self.loaded.decode_row(i, values).map_err(Fault::Value)?;
        // The other exact pairs (MXFP4, F32) either are moved above or are wider than the source.
        let inexact = |v: &f32| v.to_bits() & 0xffff != 0;
        if self.is_exact
            && self.ty == QuantType::BF16
            && let Some(column) = values.iter().position(inexact)
        {
            let problem = "is not exact in BF16; --set CLASS=F32 keeps it";
            return Err(Fault::Value(BadValue { column, value: values[column], problem }));
        }
        quantize_row(self.ty, values, self.importance, out).map_err(Fault::Codec)
    }
}
