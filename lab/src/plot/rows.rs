//! Horizontal bars, each below its name and value, which fit on every screen.

use std::fmt::Write;

use super::{PLOT_WIDTH, PlotLine, PlotTarget, escape_xml, text_width};
use crate::results::{ExperimentResult, Figure, ResultPoint, unique_in_order};
use crate::units;

/// Height of a line of text, and of a bar.
const TEXT_LINE_HEIGHT: f64 = 19.0;
const BAR_HEIGHT: f64 = 10.0;
/// Gap between a bar and the next line.
const ROW_GAP: f64 = 3.0;
/// Left edge of the bars, and length of the longest.
const BAR_LEFT: f64 = 12.0;
const MAX_BAR_LENGTH: f64 = PLOT_WIDTH - 2.0 * BAR_LEFT;

fn row_name(figure: &Figure, point: &ResultPoint) -> String {
    point.label.clone().unwrap_or_else(|| units::format_in_unit(point.x, &figure.x.unit))
}

/// Returns the length of a bar, on a linear or logarithmic scale.
fn bar_length(value: f64, least: f64, most: f64, log: bool) -> f64 {
    if value <= 0.0 || most <= 0.0 {
        return 0.0;
    }
    let part = if log {
        // The shortest bar is still visible.
        let floor = (least / 2.0).ln();
        (value.ln() - floor) / (most.ln() - floor)
    } else {
        value / most
    };
    part.clamp(0.0, 1.0) * MAX_BAR_LENGTH
}

/// Draws a group of bars for each name; returns the SVG and its height.
pub fn draw_bars(figure: &Figure, lines: &[PlotLine<'_>], paint: PlotTarget) -> (String, f64) {
    let points = || lines.iter().flat_map(|line| &line.points);
    let most = points().map(|point| point.range().most).fold(0.0, f64::max);
    let positive = points().map(|point| point.range().least).filter(|value| *value > 0.0);
    let least = positive.fold(f64::INFINITY, f64::min);
    let names: Vec<String> = points().map(|point| row_name(figure, point)).collect();
    let mut text = String::new();
    let head = format!("{}{}", figure.y.label, if figure.y.log { " (log)" } else { "" });
    let _ = write!(
        text,
        "<text x=\"8\" y=\"14\" fill=\"{}\">{}</text>",
        paint.axis_colour(),
        escape_xml(&head)
    );
    let mut y = 22.0;
    for name in unique_in_order(names.iter().map(String::as_str)) {
        let _ = write!(
            text,
            "<text x=\"8\" y=\"{:.1}\" font-weight=\"600\" fill=\"{}\">{}</text>",
            y + 14.0,
            paint.text_colour(),
            escape_xml(name),
        );
        y += TEXT_LINE_HEIGHT;
        for line in lines {
            let Some(point) = line.points.iter().find(|p| row_name(figure, p) == name) else {
                continue;
            };
            let at = |value: f64| bar_length(value, least, most, figure.y.log);
            let value = units::format_in_unit(point.median, &figure.y.unit);
            let _ = write!(
                text,
                "<text x=\"{BAR_LEFT}\" y=\"{:.1}\" fill=\"{}\"><tspan font-weight=\"600\">{}\
                 </tspan> <tspan fill=\"{}\">{}</tspan></text>\
                 <rect class=\"mark\" x=\"{BAR_LEFT}\" y=\"{:.1}\" width=\"{:.1}\" \
                 height=\"{BAR_HEIGHT}\" rx=\"2\" fill=\"{}\"/>",
                y + 14.0,
                paint.text_colour(),
                escape_xml(&value),
                paint.axis_colour(),
                escape_xml(&line.name),
                y + TEXT_LINE_HEIGHT,
                at(point.median),
                paint.line_colour(line.colour),
            );
            if point.values.len() > 1 {
                let range = point.range();
                text += &draw_spread(
                    BAR_LEFT + at(range.least),
                    BAR_LEFT + at(range.most),
                    y + TEXT_LINE_HEIGHT,
                    paint,
                );
            }
            y += TEXT_LINE_HEIGHT + BAR_HEIGHT + ROW_GAP;
        }
        y += 6.0;
    }
    (text, y + 4.0)
}

/// Draws the range of the repetitions over a bar.
fn draw_spread(least: f64, most: f64, top: f64, paint: PlotTarget) -> String {
    let middle = top + BAR_HEIGHT / 2.0;
    let (above, below) = (top + 1.0, top + BAR_HEIGHT - 1.0);
    format!(
        "<path class=\"spread\" d=\"M{least:.1} {above:.1}V{below:.1}M{least:.1} {middle:.1}\
         H{most:.1}M{most:.1} {above:.1}V{below:.1}\" fill=\"none\" stroke=\"{}\"/>",
        paint.text_colour(),
    )
}

/// Draws a stacked bar for each subject and name; returns the SVG and its height.
pub fn draw_stacked_bars(
    figure: &Figure,
    outcome: &ExperimentResult,
    paint: PlotTarget,
) -> (String, f64) {
    let of = || outcome.points.iter().filter(|point| point.metric == figure.metric);
    let series = unique_in_order(of().map(|point| point.series.as_str()));
    let mut rows: Vec<(String, Vec<&ResultPoint>)> = vec![];
    for subject in unique_in_order(of().map(|point| point.subject.as_str())) {
        for point in of().filter(|point| point.subject == subject) {
            let name = format!("{subject} · {}", row_name(figure, point));
            match rows.iter_mut().find(|(row, _)| *row == name) {
                Some((_, parts)) => parts.push(point),
                None => rows.push((name, vec![point])),
            }
        }
    }
    let total = |parts: &[&ResultPoint]| parts.iter().map(|part| part.median).sum::<f64>();
    let range = |parts: &[&ResultPoint]| -> Option<(f64, f64)> {
        // Sums per repetition, because deviations of the parts may cancel out.
        let count = parts.iter().map(|part| part.values.len()).min().filter(|count| *count > 1)?;
        let whole = |nth: usize| parts.iter().map(|part| part.values[nth]).sum::<f64>();
        let all = || (0..count).map(whole);
        Some((all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max)))
    };
    let reaches = |parts: &[&ResultPoint]| range(parts).map_or(0.0, |(_, most)| most);
    let longest = |parts: &Vec<&ResultPoint>| total(parts).max(reaches(parts));
    let most = rows.iter().map(|(_, parts)| longest(parts)).fold(0.0, f64::max).max(1e-12);
    let mut text = String::new();
    let _ = write!(
        text,
        "<text x=\"8\" y=\"14\" fill=\"{}\">{}</text>",
        paint.axis_colour(),
        escape_xml(&figure.y.label)
    );
    let mut y = 24.0;
    for (name, parts) in &rows {
        let _ = write!(
            text,
            "<text x=\"{BAR_LEFT}\" y=\"{:.1}\" fill=\"{}\">{} <tspan font-weight=\"600\">{}</tspan>\
             </text>",
            y + 14.0,
            paint.text_colour(),
            escape_xml(name),
            escape_xml(&units::format_in_unit(total(parts), &figure.y.unit)),
        );
        y += TEXT_LINE_HEIGHT;
        let mut x = BAR_LEFT;
        for part in parts {
            let wide = part.median.max(0.0) / most * MAX_BAR_LENGTH;
            let colour = series.iter().position(|name| *name == part.series).unwrap_or(0);
            let value = units::format_in_unit(part.median, &figure.y.unit);
            let _ = write!(
                text,
                "<rect class=\"mark\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.2}\" \
                 height=\"16\" fill=\"{}\"/>",
                paint.line_colour(colour),
            );
            if text_width(&value) + 6.0 < wide {
                let _ = write!(
                    text,
                    "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{}\" font-size=\"12\">{}</text>",
                    x + 4.0,
                    y + 12.5,
                    paint.background_colour(),
                    escape_xml(&value),
                );
            }
            x += wide;
        }
        if let Some((least, most_of)) = range(parts) {
            let at = |value: f64| BAR_LEFT + value.max(0.0) / most * MAX_BAR_LENGTH;
            text += &draw_spread(at(least), at(most_of), y + 16.0, paint);
        }
        y += 16.0 + BAR_HEIGHT + ROW_GAP;
    }
    (text, y + 6.0)
}
