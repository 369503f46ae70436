//! Lines and dots over two axes.

use std::fmt::Write;

use super::axis::Scale;
use super::{Line, PlotTarget, WIDTH, escape};
use crate::results::{Figure, Shape};

const HEIGHT: f64 = 300.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 46.0;

/// Draws the chart; returns the SVG and its height.
pub fn draw(figure: &Figure, lines: &[Line<'_>], paint: PlotTarget) -> (String, f64) {
    let points = || lines.iter().flat_map(|line| &line.points);
    let xs: Vec<f64> = points().map(|point| point.x).collect();
    let ys: Vec<f64> = points().map(|point| point.median).collect();
    let x = Scale::new(&figure.x, &xs, LEFT, WIDTH - RIGHT);
    let y = Scale::new(&figure.y, &ys, HEIGHT - BOTTOM, TOP);
    let mut text = frame(figure, &x, &y, paint);
    for line in lines {
        let colour = paint.colour(line.colour);
        let mut places = vec![];
        for point in &line.points {
            let (Some(at_x), Some(at_y)) = (x.place(point.x), y.place(point.median)) else {
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
                (point.values.len() > 1, y.place(range.most), y.place(range.least))
            {
                // Clipped, so that an outlier does not compress the scale.
                let (high, low) = (high.max(TOP), low.min(HEIGHT - BOTTOM));
                let _ = write!(
                    text,
                    "<line class=\"spread\" x1=\"{at_x:.1}\" x2=\"{at_x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\" \
                     stroke=\"{colour}\" opacity=\"0.5\"/>"
                );
            }
        }
        if figure.shape == Shape::Lines && !places.is_empty() {
            let _ = write!(
                text,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" \
                 stroke-dasharray=\"{}\"/>",
                places.join(" "),
                line.dashes(),
            );
        }
    }
    (text, HEIGHT)
}

fn frame(figure: &Figure, x: &Scale, y: &Scale, paint: PlotTarget) -> String {
    let (ink, soft, grid) = (paint.ink(), paint.soft(), paint.grid());
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let mut text = String::new();
    for (at, name) in y.ticks(&figure.y.unit, 6) {
        let _ = write!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" \
             stroke=\"{grid}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" \
             fill=\"{soft}\">{}</text>",
            LEFT - 6.0,
            at + 4.0,
            escape(&name),
        );
    }
    for (at, name) in x.ticks(&figure.x.unit, 6) {
        let _ = write!(
            text,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" \
             stroke=\"{grid}\"/><text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\" \
             fill=\"{soft}\">{}</text>",
            bottom + 18.0,
            escape(&name),
        );
    }
    let log = |on: bool| if on { " (log)" } else { "" };
    let _ = write!(
        text,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"{ink}\">{}{}</text>\
         <text x=\"8\" y=\"14\" fill=\"{ink}\">{}{}</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 8.0,
        escape(&figure.x.label),
        log(figure.x.log),
        escape(&figure.y.label),
        log(figure.y.log),
    );
    text
}
