//! Horizontal bars, each below its name and value, which fit on every screen.

use std::fmt::Write;

use super::{Line, PlotTarget, WIDTH, escape, text_width};
use crate::results::{Figure, Outcome, Point, unique};
use crate::units;

/// Height of a line of text, and of a bar.
const TEXT: f64 = 19.0;
const THICK: f64 = 10.0;
/// Gap between a bar and the next line.
const GAP: f64 = 3.0;
/// Left edge of the bars, and length of the longest.
const LEFT: f64 = 12.0;
const LONG: f64 = WIDTH - 2.0 * LEFT;

fn name_of(figure: &Figure, point: &Point) -> String {
    point.label.clone().unwrap_or_else(|| units::in_unit(point.x, &figure.x.unit))
}

/// Returns the length of a bar, on a linear or logarithmic scale.
fn length(value: f64, least: f64, most: f64, log: bool) -> f64 {
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
    part.clamp(0.0, 1.0) * LONG
}

/// Draws a group of bars for each name; returns the SVG and its height.
pub fn bars(figure: &Figure, lines: &[Line<'_>], paint: PlotTarget) -> (String, f64) {
    let points = || lines.iter().flat_map(|line| &line.points);
    let most = points().map(|point| point.range().most).fold(0.0, f64::max);
    let positive = points().map(|point| point.range().least).filter(|value| *value > 0.0);
    let least = positive.fold(f64::INFINITY, f64::min);
    let names: Vec<String> = points().map(|point| name_of(figure, point)).collect();
    let mut text = String::new();
    let head = format!("{}{}", figure.y.label, if figure.y.log { " (log)" } else { "" });
    let _ =
        write!(text, "<text x=\"8\" y=\"14\" fill=\"{}\">{}</text>", paint.soft(), escape(&head));
    let mut y = 22.0;
    for name in unique(names.iter().map(String::as_str)) {
        let _ = write!(
            text,
            "<text x=\"8\" y=\"{:.1}\" font-weight=\"600\" fill=\"{}\">{}</text>",
            y + 14.0,
            paint.ink(),
            escape(name),
        );
        y += TEXT;
        for line in lines {
            let Some(point) = line.points.iter().find(|p| name_of(figure, p) == name) else {
                continue;
            };
            let at = |value: f64| length(value, least, most, figure.y.log);
            let value = units::in_unit(point.median, &figure.y.unit);
            let _ = write!(
                text,
                "<text x=\"{LEFT}\" y=\"{:.1}\" fill=\"{}\"><tspan font-weight=\"600\">{}\
                 </tspan> <tspan fill=\"{}\">{}</tspan></text>\
                 <rect class=\"mark\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" \
                 height=\"{THICK}\" rx=\"2\" fill=\"{}\"/>",
                y + 14.0,
                paint.ink(),
                escape(&value),
                paint.soft(),
                escape(&line.name),
                y + TEXT,
                at(point.median),
                paint.colour(line.colour),
            );
            if point.values.len() > 1 {
                let range = point.range();
                text += &spread(LEFT + at(range.least), LEFT + at(range.most), y + TEXT, paint);
            }
            y += TEXT + THICK + GAP;
        }
        y += 6.0;
    }
    (text, y + 4.0)
}

/// Draws the range of the repetitions over a bar.
fn spread(least: f64, most: f64, top: f64, paint: PlotTarget) -> String {
    let middle = top + THICK / 2.0;
    let (above, below) = (top + 1.0, top + THICK - 1.0);
    format!(
        "<path class=\"spread\" d=\"M{least:.1} {above:.1}V{below:.1}M{least:.1} {middle:.1}\
         H{most:.1}M{most:.1} {above:.1}V{below:.1}\" fill=\"none\" stroke=\"{}\"/>",
        paint.ink(),
    )
}

/// Draws a stacked bar for each subject and name; returns the SVG and its height.
pub fn stacks(figure: &Figure, outcome: &Outcome, paint: PlotTarget) -> (String, f64) {
    let of = || outcome.points.iter().filter(|point| point.metric == figure.metric);
    let series = unique(of().map(|point| point.series.as_str()));
    let mut rows: Vec<(String, Vec<&Point>)> = vec![];
    for subject in unique(of().map(|point| point.subject.as_str())) {
        for point in of().filter(|point| point.subject == subject) {
            let name = format!("{subject} · {}", name_of(figure, point));
            match rows.iter_mut().find(|(row, _)| *row == name) {
                Some((_, parts)) => parts.push(point),
                None => rows.push((name, vec![point])),
            }
        }
    }
    let total = |parts: &[&Point]| parts.iter().map(|part| part.median).sum::<f64>();
    let range = |parts: &[&Point]| -> Option<(f64, f64)> {
        // Sums per repetition, because deviations of the parts may cancel out.
        let count = parts.iter().map(|part| part.values.len()).min().filter(|count| *count > 1)?;
        let whole = |nth: usize| parts.iter().map(|part| part.values[nth]).sum::<f64>();
        let all = || (0..count).map(whole);
        Some((all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max)))
    };
    let reaches = |parts: &[&Point]| range(parts).map_or(0.0, |(_, most)| most);
    let longest = |parts: &Vec<&Point>| total(parts).max(reaches(parts));
    let most = rows.iter().map(|(_, parts)| longest(parts)).fold(0.0, f64::max).max(1e-12);
    let mut text = String::new();
    let _ = write!(
        text,
        "<text x=\"8\" y=\"14\" fill=\"{}\">{}</text>",
        paint.soft(),
        escape(&figure.y.label)
    );
    let mut y = 24.0;
    for (name, parts) in &rows {
        let _ = write!(
            text,
            "<text x=\"{LEFT}\" y=\"{:.1}\" fill=\"{}\">{} <tspan font-weight=\"600\">{}</tspan>\
             </text>",
            y + 14.0,
            paint.ink(),
            escape(name),
            escape(&units::in_unit(total(parts), &figure.y.unit)),
        );
        y += TEXT;
        let mut x = LEFT;
        for part in parts {
            let wide = part.median.max(0.0) / most * LONG;
            let colour = series.iter().position(|name| *name == part.series).unwrap_or(0);
            let value = units::in_unit(part.median, &figure.y.unit);
            let _ = write!(
                text,
                "<rect class=\"mark\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.2}\" \
                 height=\"16\" fill=\"{}\"/>",
                paint.colour(colour),
            );
            if text_width(&value) + 6.0 < wide {
                let _ = write!(
                    text,
                    "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{}\" font-size=\"12\">{}</text>",
                    x + 4.0,
                    y + 12.5,
                    paint.paper(),
                    escape(&value),
                );
            }
            x += wide;
        }
        if let Some((least, most_of)) = range(parts) {
            let at = |value: f64| LEFT + value.max(0.0) / most * LONG;
            text += &spread(at(least), at(most_of), y + 16.0, paint);
        }
        y += 16.0 + THICK + GAP;
    }
    (text, y + 6.0)
}
