//! The picture of a curve: misses over the budget, and tokens a second below it where they are known.
//! Owns colours and labels. Never computes a point. Surprising fact: it is drawn into a string, so that the file appears
//! whole or not at all.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::curve::{Curve, Point};
use super::replay::phase_name;
use super::table::{grouped, short};
use crate::units::Bytes;

type Drawn<T> = Result<T, Box<dyn std::error::Error>>;

const WIDTH: u32 = 760;
const PANEL_HEIGHT: u32 = 360;
const TITLE_HEIGHT: u32 = 40;
const LRU: RGBColor = RGBColor(110, 120, 135);
const CHOSEN: RGBColor = RGBColor(200, 80, 20);
const OPTIMUM: RGBColor = RGBColor(30, 130, 90);
const MARK: RGBColor = RGBColor(150, 150, 150);
const FONT: &str = "sans-serif";

/// A curve with its title.
pub struct Plot<'a> {
    pub title: &'a str,
    pub curve: &'a Curve,
}

/// The picture as SVG text.
///
/// # Errors
/// Whatever the drawing library refuses.
pub fn svg(plot: &Plot<'_>) -> Drawn<String> {
    let panels = 1 + u32::from(plot.curve.speed.is_some());
    let mut text = String::new();
    {
        let root =
            SVGBackend::with_string(&mut text, (WIDTH, TITLE_HEIGHT + panels * PANEL_HEIGHT)).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, body) = root.split_vertically(TITLE_HEIGHT);
        head.draw(&Text::new(plot.title.to_owned(), (14, 12), (FONT, 16).into_font().color(&BLACK)))?;
        let areas = body.split_evenly((panels as usize, 1));
        let misses = |p: &Point| p.misses_per_token;
        panel(&areas[0], plot.curve, &format!("misses a token, {}", phase_name(plot.curve.phase)), &misses)?;
        if let (Some(speed), Some(area)) = (plot.curve.speed, areas.get(1)) {
            let what =
                format!("tokens/s at {:.1} GB/s, {:.1} ms a step", speed.drive_bytes_per_s / 1e9, speed.step_s * 1e3);
            panel(area, plot.curve, &what, &|p| speed.tokens_per_s(p.missed_bytes_per_token))?;
        }
        root.present()?;
    }
    Ok(text)
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    curve: &Curve,
    what: &str,
    value: &dyn Fn(&Point) -> f64,
) -> Drawn<()> {
    let lists = [Some(&curve.lru), Some(&curve.chosen), curve.optimum.as_ref()];
    let top = lists.into_iter().flatten().flatten().map(value).fold(0.0, f64::max);
    let y: Range<f64> = 0.0..if top > 0.0 { 1.08 * top } else { 1.0 };
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_right(30)
        .x_label_area_size(44)
        .y_label_area_size(58)
        .build_cartesian_2d(0.0..100.0, y.clone())?;
    let size = if curve.all.0 > curve.experts { format!("; 100 % = {}", Bytes(curve.all.0)) } else { String::new() };
    chart
        .configure_mesh()
        .max_light_lines(0)
        .bold_line_style(RGBColor(228, 228, 228))
        .x_desc(format!("cache, percent of {} experts{size}", grouped(curve.experts)))
        .y_desc(what.to_owned())
        .x_label_formatter(&|percent| format!("{percent:.0}"))
        .y_label_formatter(&|value| short(*value))
        .label_style((FONT, 13))
        .draw()?;
    let share = |slots: u64| 100.0 * slots as f64 / curve.experts as f64;
    let xy = |p: &Point| (share(p.slots), value(p));
    for (slots, name) in [(Some(curve.floor), "floor"), (curve.knee, "knee of lru")] {
        let Some(slots) = slots else { continue };
        let line = [(share(slots), y.start), (share(slots), y.end)];
        chart.draw_series(DashedLineSeries::new(line, 5, 4, MARK.stroke_width(1)))?;
        let label = format!("{name} {}", grouped(slots));
        let style = (FONT, 12).into_font().color(&RGBColor(90, 90, 90));
        chart.draw_series(std::iter::once(Text::new(label, (share(slots) + 0.7, y.end * 0.985), style)))?;
    }
    chart
        .draw_series(LineSeries::new(curve.lru.iter().map(xy), LRU.stroke_width(2)))?
        .label("lru")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], LRU.stroke_width(2)));
    let dotted = [(Some(&curve.chosen), curve.policy, CHOSEN), (curve.optimum.as_ref(), "optimum (Belady)", OPTIMUM)];
    for (points, name, color) in dotted {
        let Some(points) = points else { continue };
        chart
            .draw_series(LineSeries::new(points.iter().map(xy), color.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    let is_falling = curve.lru.first().map(value) > curve.lru.last().map(value);
    chart
        .configure_series_labels()
        .position(if is_falling { SeriesLabelPosition::MiddleRight } else { SeriesLabelPosition::LowerRight })
        .background_style(WHITE.mix(0.9))
        .border_style(RGBColor(210, 210, 210))
        .label_font((FONT, 13))
        .draw()?;
    Ok(())
}
