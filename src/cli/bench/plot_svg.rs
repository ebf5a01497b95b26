//! Draws panels of lines as one SVG text. Never reads rows or files. Surprising fact: a linear scale always begins at zero, so that a small
//! difference looks small; a logarithmic one is drawn as the linear scale of its logarithms, with the labels turned back.

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
    /// Both scales are logarithmic; every value is above zero.
    pub is_log: bool,
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

/// One axis: how values become places on it, where it begins and ends, and how many marks it has.
#[derive(Clone, Copy)]
struct Scale {
    is_log: bool,
    begin: f64,
    end: f64,
    marks: usize,
}

impl Scale {
    fn over(values: impl Iterator<Item = f64>, is_log: bool) -> Self {
        let (mut least, mut most) = (f64::INFINITY, 0.0f64);
        for value in values {
            (least, most) = (least.min(value), most.max(value));
        }
        if !is_log {
            return Self { is_log, begin: 0.0, end: above_zero(most * 1.05), marks: 11 };
        }
        let (begin, end) = (least.log2().floor(), most.log2().ceil());
        let end = if end > begin { end } else { begin + 1.0 };
        Self { is_log, begin, end, marks: ((end - begin) as usize + 1).min(14) }
    }

    fn place(&self, value: f64) -> f64 {
        if self.is_log { value.log2() } else { value }
    }

    fn label(&self, place: f64) -> String {
        let value = if self.is_log { place.exp2() } else { place };
        if value.fract().abs() < 1e-9 { format!("{value:.0}") } else { short(value) }
    }
}

fn draw(panel: &Panel, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), Failed> {
    let points = || panel.series.iter().flat_map(|series| &series.points);
    let x = Scale::over(points().map(|p| p.0), panel.is_log);
    let y = Scale::over(points().map(|p| p.1), panel.is_log);
    let place = |p: &(f64, f64)| (x.place(p.0), y.place(p.1));
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_right(24)
        .caption(panel.y_name, ("sans-serif", 15))
        .x_label_area_size(42)
        .y_label_area_size(64)
        .build_cartesian_2d(x.begin..x.end, y.begin..y.end)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .x_desc(panel.x_name)
        .x_labels(x.marks)
        .y_labels(y.marks)
        .x_label_formatter(&|at| x.label(*at))
        .y_label_formatter(&|at| y.label(*at))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .draw()
        .map_err(failed)?;
    for (i, series) in panel.series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        chart
            .draw_series(LineSeries::new(series.medians.iter().map(place), colour.stroke_width(2)))
            .map_err(failed)?
            .label(series.name.as_str())
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(series.points.iter().map(|p| Circle::new(place(p), 3, colour.filled()))).map_err(failed)?;
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
        let mut panel = Panel {
            x_name: "x axis",
            y_name: "y axis",
            is_log: false,
            series: vec![series("one & <two>"), series("b")],
        };
        panel.scale_x(0.5);
        let text = svg("a \"title\" <of> it", &[panel.clone(), panel]).unwrap();
        assert_eq!(text.matches("<circle").count(), 12, "{text}");
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        assert!(text.contains("one &amp; &lt;two&gt;") && text.contains("x axis"), "{text}");
    }

    #[test]
    fn scales() {
        let linear = Scale::over([3.0, 20.0].into_iter(), false);
        assert_eq!((linear.begin, linear.end, linear.place(3.0), linear.label(3.0).as_str()), (0.0, 21.0, 3.0, "3"));
        let log = Scale::over([3.0, 20.0].into_iter(), true);
        assert_eq!((log.begin, log.end, log.marks, log.label(4.0).as_str()), (1.0, 5.0, 5, "16"));
        assert_eq!((log.place(8.0), Scale::over([4.0].into_iter(), true).end), (3.0, 3.0));
        let panel = |is_log| {
            let series = Series { name: "a".into(), points: vec![(1.0, 2.0), (1024.0, 4.0)], medians: vec![] };
            svg("t", &[Panel { x_name: "x", y_name: "y", is_log, series: vec![series] }]).unwrap()
        };
        assert!(panel(true).contains("1024") && panel(true) != panel(false), "{}", panel(true));
    }

    #[test]
    fn labels() {
        assert_eq!([short(0.1), short(12.5), short(1234.5), short(0.00025)], ["0.1", "12.5", "1234", "0.00025"]);
        assert_eq!((above_zero(0.0), above_zero(3.0)), (1.0, 3.0));
    }
}
