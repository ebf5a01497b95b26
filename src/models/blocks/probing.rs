//! Copies for probes out of the buffers of a pass. Never copies what nobody wants to see.
//! Surprising fact: with a probe every shown point waits for the device.

use crate::backend::{Backend, BackendError};
use crate::models::probe::{Point, Probe};

/// Where values belong.
#[derive(Clone, Copy)]
pub struct Place {
    pub point: Point,
    pub layer: usize,
    /// Position of the first row.
    pub first_pos: usize,
}

/// Shows `[rows, width]` values to a probe that wants them.
pub fn show<B: Backend>(
    backend: &B,
    probe: Option<&mut (dyn Probe + '_)>,
    place: Place,
    (rows, width): (usize, usize),
    buf: &B::Buf,
) -> Result<(), BackendError> {
    if let Some(probe) = probe.filter(|p| p.wants(place.point)) {
        let mut values = vec![0.0; rows * width];
        backend.download(buf, 0, &mut values)?;
        probe.values(place.point, place.layer, place.first_pos, width, &values);
    }
    Ok(())
}

/// As `show`, for ids.
pub fn show_ids<B: Backend>(
    backend: &B,
    probe: Option<&mut (dyn Probe + '_)>,
    place: Place,
    (rows, width): (usize, usize),
    ids: &B::Ids,
) -> Result<(), BackendError> {
    if let Some(probe) = probe.filter(|p| p.wants(place.point)) {
        let mut values = vec![0; rows * width];
        backend.download_ids(ids, 0, &mut values)?;
        probe.ids(place.point, place.layer, place.first_pos, width, &values);
    }
    Ok(())
}
