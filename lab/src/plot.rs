//! Figures as SVG: embedded in the report with its colours, or as separate files.

mod axis;
mod chart;
mod rows;

use std::fmt::Write;

use crate::results::{ExperimentResult, Figure, FigureShape, ResultPoint, unique_in_order};

/// Width of every figure, in SVG units: narrow, so that texts are readable on a phone.
pub const PLOT_WIDTH: f64 = 480.0;

/// Target of a figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlotTarget {
    /// Embedded in a page that defines `--ink`, `--soft`, `--grid` and `--c0` to `--c7`.
    Page,
    /// Separate file, on white.
    File,
}

/// Colours that colour-blind people can tell apart (after Okabe and Ito).
const LINE_COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#3a9bd9", "#555555", "#7b3fa0"];

impl PlotTarget {
    fn line_colour(self, nth: usize) -> String {
        let nth = nth % LINE_COLOURS.len();
        match self {
            Self::Page => format!("var(--c{nth})"),
            Self::File => LINE_COLOURS[nth].into(),
        }
    }

    fn text_colour(self) -> &'static str {
        if self == Self::Page { "var(--ink)" } else { "#222222" }
    }

    fn axis_colour(self) -> &'static str {
        if self == Self::Page { "var(--soft)" } else { "#666666" }
    }

    /// Colour of text on coloured areas: light on a light page, dark on a dark one.
    fn background_colour(self) -> &'static str {
        if self == Self::Page { "var(--paper)" } else { "#ffffff" }
    }

    fn grid_colour(self) -> &'static str {
        if self == Self::Page { "var(--grid)" } else { "#dddddd" }
    }
}

/// Dash patterns of the series of one subject.
const LINE_DASHES: [&str; 4] = ["", "7 4", "2 3", "9 3 2 3"];

/// One line, or one colour of bars.
pub struct PlotLine<'a> {
    /// Name in the legend.
    pub name: String,
    /// Index of the colour.
    pub colour: usize,
    /// Index of the dash pattern.
    pub dash: usize,
    /// Its points.
    pub points: Vec<&'a ResultPoint>,
}

impl PlotLine<'_> {
    fn dashes(&self) -> &'static str {
        LINE_DASHES[self.dash % LINE_DASHES.len()]
    }
}

/// Returns the lines of a figure: a colour for each subject and a dash for each series; with one
/// subject, a colour for each series.
pub fn plot_lines<'a>(outcome: &'a ExperimentResult, figure: &Figure) -> Vec<PlotLine<'a>> {
    let points: Vec<&ResultPoint> =
        outcome.points.iter().filter(|p| p.metric == figure.metric).collect();
    let subjects = unique_in_order(points.iter().map(|point| point.subject.as_str()));
    let all_series = unique_in_order(points.iter().map(|point| point.series.as_str()));
    let mut lines = vec![];
    for (nth_subject, subject) in subjects.iter().enumerate() {
        for (nth_series, series) in all_series.iter().enumerate() {
            let own = |p: &&&ResultPoint| p.subject == *subject && p.series == *series;
            let points: Vec<&ResultPoint> = points.iter().filter(own).copied().collect();
            if points.is_empty() {
                continue;
            }
            let (colour, dash) = match figure.shape {
                FigureShape::Stacks => (nth_series, 0),
                // Dots have no dashes.
                FigureShape::Dots => (lines.len(), 0),
                _ if subjects.len() == 1 => (nth_series, nth_series / LINE_COLOURS.len()),
                _ => (nth_subject, nth_series),
            };
            let name = match (subjects.len(), series.is_empty()) {
                (_, true) => (*subject).to_string(),
                (1, _) => (*series).to_string(),
                _ => format!("{subject} · {series}"),
            };
            lines.push(PlotLine { name, colour, dash, points });
        }
    }
    lines
}

/// Returns the legend as names, colours and dashes; empty if rows contain the names.
pub fn legend_entries(
    outcome: &ExperimentResult,
    figure: &Figure,
) -> Vec<(String, usize, &'static str)> {
    match figure.shape {
        FigureShape::Bars => vec![],
        FigureShape::Stacks => {
            let of = outcome.points.iter().filter(|p| p.metric == figure.metric);
            let series = unique_in_order(of.map(|point| point.series.as_str()));
            series.iter().enumerate().map(|(nth, name)| ((*name).to_string(), nth, "")).collect()
        }
        _ => {
            let lines = plot_lines(outcome, figure);
            lines.into_iter().map(|l| (l.name.clone(), l.colour, l.dashes())).collect()
        }
    }
}

/// Draws a figure as SVG; `None` if it has no points.
pub fn draw_svg(outcome: &ExperimentResult, figure: &Figure, paint: PlotTarget) -> Option<String> {
    let lines = plot_lines(outcome, figure);
    let drawn = lines.iter().flat_map(|line| &line.points).any(|point| point.median.is_finite());
    if !drawn {
        return None;
    }
    let (body, height) = match figure.shape {
        FigureShape::Lines | FigureShape::Dots => chart::draw_chart(figure, &lines, paint),
        FigureShape::Bars => rows::draw_bars(figure, &lines, paint),
        FigureShape::Stacks => rows::draw_stacked_bars(figure, outcome, paint),
    };
    Some(match paint {
        PlotTarget::Page => {
            let chart = matches!(figure.shape, FigureShape::Lines | FigureShape::Dots);
            wrap_svg(&body, height, &figure.title, if chart { "chart" } else { "rows" })
        }
        PlotTarget::File => wrap_with_title_and_legend(outcome, figure, &body, height),
    })
}

const FONT_ATTRIBUTE: &str =
    "font-family=\"system-ui, 'DejaVu Sans', 'Liberation Sans', sans-serif\"";

fn wrap_svg(body: &str, height: f64, title: &str, class: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"{class}\" viewBox=\"0 0 {PLOT_WIDTH} {height}\" role=\"img\" \
         {FONT_ATTRIBUTE} font-size=\"13\"><title>{}</title>{body}</svg>",
        escape_xml(title)
    )
}

/// Wraps a figure with title and legend.
fn wrap_with_title_and_legend(
    outcome: &ExperimentResult,
    figure: &Figure,
    body: &str,
    height: f64,
) -> String {
    const TITLE_HEIGHT: f64 = 34.0;
    let paint = PlotTarget::File;
    let mut legend_text = String::new();
    let (mut x, mut y) = (16.0, TITLE_HEIGHT + height + 16.0);
    let legend = legend_entries(outcome, figure);
    for (name, colour, dashes) in &legend {
        let wide = 40.0 + text_width(name);
        if x > 16.0 && x + wide > PLOT_WIDTH - 8.0 {
            (x, y) = (16.0, y + 20.0);
        }
        let colour = paint.line_colour(*colour);
        let _ = write!(
            legend_text,
            "<line x1=\"{x}\" x2=\"{}\" y1=\"{}\" y2=\"{}\" stroke=\"{colour}\" \
             stroke-width=\"3\" stroke-dasharray=\"{dashes}\"/>\
             <text x=\"{}\" y=\"{y}\" fill=\"{}\">{}</text>",
            x + 20.0,
            y - 4.0,
            y - 4.0,
            x + 26.0,
            paint.text_colour(),
            escape_xml(name),
        );
        x += wide;
    }
    let bottom = if legend.is_empty() { TITLE_HEIGHT + height } else { y + 12.0 };
    let title = format!("{}: {}", outcome.name, figure.title);
    let inner = format!(
        "<rect width=\"{PLOT_WIDTH}\" height=\"{bottom}\" fill=\"#ffffff\"/>\
         <text x=\"16\" y=\"22\" font-size=\"15\" font-weight=\"600\" fill=\"{}\">{}</text>\
         <g transform=\"translate(0 {TITLE_HEIGHT})\">{body}</g>{legend_text}",
        paint.text_colour(),
        escape_xml(&title),
    );
    wrap_svg(&inner, bottom, &figure.title, "file")
}

/// Estimates the width of a text at the usual size.
pub fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 7.4
}

/// Escapes a text for XML.
pub fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Sample;

    fn test_outcome(shape: FigureShape) -> ExperimentResult {
        let figure = Figure::new(shape, "speed", "A < B")
            .with_x_axis("buffer", "B")
            .with_y_axis("speed", "B/s");
        let mut outcome = ExperimentResult { name: "it".into(), ..ExperimentResult::default() };
        outcome.figures.push(figure.with_log_x().with_log_y());
        for subject in ["mem", "disk"] {
            for (x, label) in [(4096.0, "small"), (1e6, "large")] {
                for y in [x * 2.0, x * 3.0] {
                    let mut sample = Sample::at_x("speed", "cold", x, y);
                    sample.label = Some(label.into());
                    outcome.add_samples(subject, &[sample]);
                }
            }
        }
        outcome.compute_medians_and_spreads();
        outcome
    }

    #[test]
    fn every_shape_draws_every_point() {
        for (shape, mark) in [
            (FigureShape::Lines, "<polyline"),
            (FigureShape::Dots, "<circle"),
            (FigureShape::Bars, "class=\"mark\""),
            (FigureShape::Stacks, "class=\"mark\""),
        ] {
            let outcome = test_outcome(shape);
            for paint in [PlotTarget::Page, PlotTarget::File] {
                let svg = draw_svg(&outcome, &outcome.figures[0], paint).unwrap();
                assert!(svg.contains(mark), "{shape:?}: {svg}");
                // Repeated values have a spread.
                assert!(svg.contains("class=\"spread\""), "{shape:?}: {svg}");
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{shape:?}: {svg}");
                assert!(svg.contains("A &lt; B"));
            }
        }
    }

    #[test]
    fn figure_without_points_has_no_plot() {
        let outcome = ExperimentResult::default();
        let figure = Figure::new(FigureShape::Lines, "speed", "nothing");
        assert!(draw_svg(&outcome, &figure, PlotTarget::Page).is_none());
    }
}
