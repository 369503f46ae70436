//! Summary on the terminal: a table for each figure, with ratios and small bars.

use std::path::Path;

use crate::results::{
    ExperimentResult, Figure, MAX_PERCENT_SPREAD, ResultPoint, Results, ValueRange, unique_in_order,
};
use crate::stats;
use crate::units;

/// Width of a bar, in characters.
const BAR_WIDTH: usize = 20;
/// Maximum number of points of a line; longer lines are summarized.
const MAX_POINTS: usize = 12;

/// Formats one experiment, whose files are in `dir`.
pub fn format_outcome(outcome: &ExperimentResult, dir: &Path) -> String {
    let mut text = format!("\n{} - {}\n", outcome.name, outcome.asks);
    for figure in &outcome.figures {
        text += &format_table(outcome, figure);
    }
    for found in &outcome.found {
        text += &format!("  > {found}\n");
    }
    for profile in &outcome.profiles {
        let file = dir.join(profile.file_name());
        text +=
            &format!("  the profile for a store on {}: {}\n", profile.subject, profile.describe());
        text.extend(profile.why.iter().map(|why| format!("    {why}\n")));
        text += &format!("    draconis store create --profile {} STORE\n", file.display());
    }
    for note in &outcome.notes {
        text += &format!("  note: {note}\n");
    }
    text
}

/// Formats what follows the experiments, such as skipped subjects and warnings.
pub fn format_footer(results: &Results) -> String {
    let mut text = String::new();
    for skipped in &results.skipped {
        text += &format!(
            "skipped: {} for {}: it needs {}\n",
            skipped.subject, skipped.experiment, skipped.needs
        );
    }
    for warning in &results.warnings {
        text += &format!("warning: {warning}\n");
    }
    text += &format!(
        "{:.0} s; seed {}; one look at the clock {:.0} ns\n",
        results.seconds, results.seed, results.stopwatch_ns
    );
    text
}

fn format_table(outcome: &ExperimentResult, figure: &Figure) -> String {
    let of_figure = || outcome.points.iter().filter(|point| point.metric == figure.metric);
    let most = of_figure().map(|point| point.median.abs()).fold(0.0, f64::max);
    if of_figure().next().is_none() {
        return String::new();
    }
    let mut text = format!("  {}\n", figure.title);
    for subject in unique_in_order(of_figure().map(|point| point.subject.as_str())) {
        let points: Vec<&ResultPoint> =
            of_figure().filter(|point| point.subject == subject).collect();
        for series in unique_in_order(points.iter().map(|point| point.series.as_str())) {
            let line: Vec<&ResultPoint> =
                points.iter().copied().filter(|point| point.series == series).collect();
            text += &format_rows(figure, subject, series, &line, most);
        }
    }
    for (subject, ratio, base) in mean_ratios(outcome, figure) {
        text += &match ratio {
            Some(ratio) => {
                format!("    {subject}: {} x {base}\n", units::format_significant(ratio))
            }
            None => format!("    {subject}: not told apart from {base}\n"),
        };
    }
    text
}

fn format_rows(
    figure: &Figure,
    subject: &str,
    series: &str,
    line: &[&ResultPoint],
    most: f64,
) -> String {
    let name = if series.is_empty() { subject.into() } else { format!("{subject} · {series}") };
    if line.len() > MAX_POINTS {
        let values: Vec<f64> = line.iter().map(|point| point.median).collect();
        let part =
            |q| units::format_in_unit(stats::quantile(&values, q).unwrap_or(0.0), &figure.y.unit);
        let all = values.len();
        return format!(
            "    {name}: {all} points, median {}, least {}, most {}\n",
            part(0.5),
            part(0.0),
            part(1.0)
        );
    }
    let mut text = format!("    {name}\n");
    for point in line {
        let place = match &point.label {
            Some(label) => label.clone(),
            None => units::format_in_unit(point.x, &figure.x.unit),
        };
        let value = units::format_in_unit(point.median, &figure.y.unit);
        let bar = format_bar(point.median, most, figure.y.log);
        let spread = match point.values.len() {
            1 => String::new(),
            _ if point.spread <= MAX_PERCENT_SPREAD => format!(" ±{:.0} %", point.spread * 50.0),
            _ => {
                let ValueRange { least, most, .. } = point.range();
                let of = |value| units::format_in_unit(value, &figure.y.unit);
                format!(" {} to {} ", of(least), of(most))
            }
        };
        let warm = if point.cold == Some(false) { " (not cold)" } else { "" };
        text += &format!("      {place:<26} {value:>12}{spread:<8} {bar}{warm}\n");
    }
    text
}

/// Formats a bar on a linear or logarithmic scale.
fn format_bar(value: f64, most: f64, log: bool) -> String {
    if most <= 0.0 || value <= 0.0 {
        return String::new();
    }
    let part = match log {
        // A logarithmic bar covers six decades.
        true => 1.0 + (value / most).log10() / 6.0,
        false => value / most,
    };
    "█".repeat((part.clamp(0.0, 1.0) * BAR_WIDTH as f64).round() as usize)
}

/// Compares each subject with the first: geometric mean over their common points; `None` if the
/// spread of the repetitions leaves open which is better.
pub fn mean_ratios<'a>(
    outcome: &'a ExperimentResult,
    figure: &Figure,
) -> Vec<(&'a str, Option<f64>, &'a str)> {
    let of_figure = || outcome.points.iter().filter(|point| point.metric == figure.metric);
    let subjects = unique_in_order(of_figure().map(|point| point.subject.as_str()));
    let Some((base, others)) = subjects.split_first() else { return vec![] };
    if figure.more_is_better.is_none() {
        return vec![];
    }
    let ratio = |subject: &&'a str| {
        let both = of_figure().filter(|point| point.subject == **subject).filter_map(|point| {
            let peer = of_figure().find(|peer| {
                peer.subject == *base
                    && peer.series == point.series
                    && peer.x == point.x
                    && peer.label == point.label
            })?;
            (peer.median > 0.0).then_some((point.range(), peer.range()))
        });
        let both: Vec<(ValueRange, ValueRange)> = both.collect();
        let mean = |of: &dyn Fn(&(ValueRange, ValueRange)) -> f64| {
            stats::geometric_mean(&both.iter().map(of).collect::<Vec<_>>())
        };
        let ratio = mean(&|(it, base)| it.median / base.median)?;
        // Worst cases: all repetitions of one were the best, and of the other the worst.
        let least = mean(&|(it, base)| it.least / base.most)?;
        let most = mean(&|(it, base)| it.most / base.least)?;
        let is_open = (least..=most).contains(&1.0);
        Some((*subject, (!is_open).then_some(ratio), *base))
    };
    others.iter().filter_map(ratio).collect()
}
