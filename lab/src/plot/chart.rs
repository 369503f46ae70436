//! Lines and dots over two axes.

use std::fmt::Write;

use super::axis::AxisScale;
use super::{PLOT_WIDTH, PlotLine, PlotTarget, escape_xml};
use crate::results::{Figure, FigureShape};

const CHART_HEIGHT: f64 = 300.0;
const LEFT_MARGIN: f64 = 84.0;
const RIGHT_MARGIN: f64 = 14.0;
const TOP_MARGIN: f64 = 26.0;
const BOTTOM_MARGIN: f64 = 46.0;

/// Draws the chart; returns the SVG and its height.
pub fn draw_chart(figure: &Figure, lines: &[PlotLine<'_>], paint: PlotTarget) -> (String, f64) {
    let points = || lines.iter().flat_map(|line| &line.points);
    let xs: Vec<f64> = points().map(|point| point.x).collect();
    let ys: Vec<f64> = points().map(|point| point.median).collect();
    let x = AxisScale::new(&figure.x, &xs, LEFT_MARGIN, PLOT_WIDTH - RIGHT_MARGIN);
    let y = AxisScale::new(&figure.y, &ys, CHART_HEIGHT - BOTTOM_MARGIN, TOP_MARGIN);
    let mut text = draw_frame(figure, &x, &y, paint);
    for line in lines {
        let colour = paint.line_colour(line.colour);
        let mut places = vec![];
        for point in &line.points {
            let (Some(at_x), Some(at_y)) = (x.position(point.x), y.position(point.median)) else {
                continue;
            };
            places.push(format!("{at_x:.1},{at_y:.1}"));
            let radius = if line.points.len() > 60 { 1.6 } else { 3.0 };
            let _ = write!(
                text,
                "<circle class=\"mark\" cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"{radius}\" \
                 fill=\"{colour}\"/>"
            );
            // Range of the repetitions.
            let range = point.range();
            if let (true, Some(high), Some(low)) =
                (point.values.len() > 1, y.position(range.most), y.position(range.least))
            {
                // Clipped, so that an outlier does not compress the scale.
                let (high, low) = (high.max(TOP_MARGIN), low.min(CHART_HEIGHT - BOTTOM_MARGIN));
                let _ = write!(
                    text,
                    "<line class=\"spread\" x1=\"{at_x:.1}\" x2=\"{at_x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\" \
                     stroke=\"{colour}\" opacity=\"0.5\"/>"
                );
            }
        }
        if figure.shape == FigureShape::Lines && !places.is_empty() {
            let _ = write!(
                text,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" \
                 stroke-dasharray=\"{}\"/>",
                places.join(" "),
                line.dashes(),
            );
        }
    }
    (text, CHART_HEIGHT)
}

fn draw_frame(figure: &Figure, x: &AxisScale, y: &AxisScale, paint: PlotTarget) -> String {
    let (ink, soft, grid) = (paint.text_colour(), paint.axis_colour(), paint.grid_colour());
    let (right, bottom) = (PLOT_WIDTH - RIGHT_MARGIN, CHART_HEIGHT - BOTTOM_MARGIN);
    let mut text = String::new();
    for (at, name) in y.ticks(&figure.y.unit, 6) {
        let _ = write!(
            text,
            "<line x1=\"{LEFT_MARGIN}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" \
             stroke=\"{grid}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" \
             fill=\"{soft}\">{}</text>",
            LEFT_MARGIN - 6.0,
            at + 4.0,
            escape_xml(&name),
        );
    }
    for (at, name) in x.ticks(&figure.x.unit, 6) {
        let _ = write!(
            text,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP_MARGIN}\" y2=\"{bottom}\" \
             stroke=\"{grid}\"/><text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\" \
             fill=\"{soft}\">{}</text>",
            bottom + 18.0,
            escape_xml(&name),
        );
    }
    let log = |on: bool| if on { " (log)" } else { "" };
    let _ = write!(
        text,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"{ink}\">{}{}</text>\
         <text x=\"8\" y=\"14\" fill=\"{ink}\">{}{}</text>",
        (LEFT_MARGIN + right) / 2.0,
        CHART_HEIGHT - 8.0,
        escape_xml(&figure.x.label),
        log(figure.x.log),
        escape_xml(&figure.y.label),
        log(figure.y.log),
    );
    text
}
