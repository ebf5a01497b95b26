//! Draws panels of lines as one SVG text. Never reads rows or files. Surprising fact: the scale of a panel always begins at zero, so that
//! a small difference looks small.

use plotters::coord::Shift;
use plotters::prelude::*;

/// One line and the points around it.
#[derive(Clone, PartialEq, Debug)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// By rising x.
    pub medians: Vec<(f64, f64)>,
}

/// One diagram.
#[derive(Clone, PartialEq, Debug)]
pub struct Panel {
    pub x_name: &'static str,
    pub y_name: &'static str,
    pub series: Vec<Series>,
}

impl Panel {
    /// Multiplies all x by `factor`.
    pub fn scale_x(&mut self, factor: f64) {
        for series in &mut self.series {
            series.points.iter_mut().chain(&mut series.medians).for_each(|point| point.0 *= factor);
        }
    }
}

const WIDTH: u32 = 960;
const PANEL_HEIGHT: u32 = 380;
const TITLE_HEIGHT: u32 = 40;
/// Told apart by the colour-blind too (Okabe and Ito), black last.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
    RGBColor(0, 0, 0),
];

type Failed = Box<dyn std::error::Error>;

/// All panels below one another under `title`.
///
/// # Errors
/// What the drawing library refuses.
pub fn svg(title: &str, panels: &[Panel]) -> Result<String, Failed> {
    let mut text = String::new();
    let height = TITLE_HEIGHT + PANEL_HEIGHT * panels.len() as u32;
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let (head, body) = root.split_vertically(TITLE_HEIGHT);
        head.draw_text(title, &("sans-serif", 16).into_text_style(&head), (16, 14)).map_err(failed)?;
        for (panel, area) in panels.iter().zip(body.split_evenly((panels.len(), 1))) {
            draw(panel, &area)?;
        }
        root.present().map_err(failed)?;
    }
    Ok(text)
}

fn failed(error: impl std::fmt::Display) -> Failed {
    error.to_string().into()
}

fn draw(panel: &Panel, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), Failed> {
    let points = || panel.series.iter().flat_map(|series| &series.points);
    let end = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max) * 1.05;
    let (x_end, y_end) = (end(&mut points().map(|p| p.0)), end(&mut points().map(|p| p.1)));
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_right(24)
        .caption(panel.y_name, ("sans-serif", 15))
        .x_label_area_size(42)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..above_zero(x_end), 0.0..above_zero(y_end))
        .map_err(failed)?;
    let label = |value: &f64| if value.fract().abs() < 1e-9 { format!("{value:.0}") } else { short(*value) };
    chart
        .configure_mesh()
        .x_desc(panel.x_name)
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .draw()
        .map_err(failed)?;
    for (i, series) in panel.series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        chart
            .draw_series(LineSeries::new(series.medians.iter().copied(), colour.stroke_width(2)))
            .map_err(failed)?
            .label(series.name.as_str())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(series.points.iter().map(|p| Circle::new(*p, 3, colour.filled()))).map_err(failed)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()
        .map_err(failed)
}

/// An axis needs some length, also when all values are zero.
fn above_zero(end: f64) -> f64 {
    if end > 0.0 && end.is_finite() { end } else { 1.0 }
}

/// Three significant digits.
fn short(value: f64) -> String {
    let digits = (2 - value.abs().log10().floor() as i32).clamp(0, 9) as usize;
    format!("{value:.digits$}").trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_and_point_is_drawn() {
        let series = |name: &str| Series {
            name: name.into(),
            points: vec![(1.0, 2.0), (1.0, 4.0), (2.0, 3.0)],
            medians: vec![(1.0, 3.0), (2.0, 3.0)],
        };
        let mut panel = Panel { x_name: "x axis", y_name: "y axis", series: vec![series("one & <two>"), series("b")] };
        panel.scale_x(0.5);
        let text = svg("a \"title\" <of> it", &[panel.clone(), panel]).unwrap();
        assert_eq!(text.matches("<circle").count(), 12, "{text}");
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        assert!(text.contains("one &amp; &lt;two&gt;") && text.contains("x axis"), "{text}");
    }

    #[test]
    fn labels() {
        assert_eq!([short(0.1), short(12.5), short(1234.5), short(0.00025)], ["0.1", "12.5", "1234", "0.00025"]);
        assert_eq!((above_zero(0.0), above_zero(3.0)), (1.0, 3.0));
    }
}
