//! Comparison of two results: changes and noise.
//!
//! A value has changed if all repetitions of one run lie beyond all repetitions of the other, and
//! by more than [`MIN_RELATIVE_CHANGE`]. With single repetitions, as on models, which are deterministic,
//! any difference counts.

use crate::results::{ExperimentResult, Figure, ResultPoint, Results};
use crate::stats;
use crate::units;

/// Minimum difference of medians that counts as a change, if values are noisy.
const MIN_RELATIVE_CHANGE: f64 = 0.05;

/// Change of one value.
#[derive(Clone, Copy, PartialEq, Debug)]
enum PointChange {
    Better,
    Worse,
    /// Changed, where neither direction is better.
    Other,
    Noise,
}

impl PointChange {
    fn symbol(self) -> &'static str {
        match self {
            Self::Better => "+",
            Self::Worse => "-",
            Self::Other => "*",
            Self::Noise => " ",
        }
    }
}

/// Formats the comparison as text.
pub fn format_comparison(a: &Results, b: &Results) -> String {
    let mut text = format!("A: {} ({})\nB: {} ({})\n", a.machine, a.size, b.machine, b.size);
    if a.size != b.size {
        text += "warning: the sizes differ, and with them what was measured\n";
    }
    if a.seed != b.seed {
        text += "note: the seeds differ\n";
    }
    let (mut changed, mut all) = (0, 0);
    for of_a in &a.experiments {
        let Some(of_b) = b.experiments.iter().find(|one| one.name == of_a.name) else {
            text += &format!("\n{}: only in A\n", of_a.name);
            continue;
        };
        for figure in &of_a.figures {
            let (lines, both, moved) = compare_figures(of_a, of_b, figure);
            (changed, all) = (changed + moved, all + both);
            if both > 0 {
                text += &lines;
            }
        }
    }
    let names = |one: &ExperimentResult| !a.experiments.iter().any(|other| other.name == one.name);
    for only in b.experiments.iter().filter(|one| names(one)) {
        text += &format!("\n{}: only in B\n", only.name);
    }
    text + &format!("\n{changed} of {all} values changed beyond the noise (+ better, - worse)\n")
}

/// Returns the lines of a figure, the number of common values, and the number of changed ones.
fn compare_figures(
    a: &ExperimentResult,
    b: &ExperimentResult,
    figure: &Figure,
) -> (String, usize, usize) {
    let (mut rows, mut ratios, mut both, mut changed) = (String::new(), vec![], 0, 0);
    for of_a in a.points.iter().filter(|point| point.metric == figure.metric) {
        let same = |p: &&ResultPoint| {
            p.metric == of_a.metric
                && p.subject == of_a.subject
                && p.series == of_a.series
                && p.x == of_a.x
                && p.label == of_a.label
        };
        let Some(of_b) = b.points.iter().find(same) else { continue };
        both += 1;
        if of_a.median > 0.0 && of_b.median > 0.0 {
            ratios.push(of_b.median / of_a.median);
        }
        let change = classify_change(of_a, of_b, figure.more_is_better);
        if change == PointChange::Noise {
            continue;
        }
        changed += 1;
        let place = match &of_a.label {
            Some(label) => label.clone(),
            None => units::format_in_unit(of_a.x, &figure.x.unit),
        };
        rows += &format!(
            "  {} {} {} {place}: {} -> {}, {} x\n",
            change.symbol(),
            of_a.subject,
            of_a.series,
            units::format_in_unit(of_a.median, &figure.y.unit),
            units::format_in_unit(of_b.median, &figure.y.unit),
            units::format_significant(of_b.median / of_a.median),
        );
    }
    let mean = stats::geometric_mean(&ratios);
    let mean = mean
        .map_or_else(String::new, |mean| format!(", B is {} x A", units::format_significant(mean)));
    let head = format!("\n{}, {}: {changed} of {both} changed{mean}\n", a.name, figure.title);
    (head + &rows, both, changed)
}

fn classify_change(a: &ResultPoint, b: &ResultPoint, more_is_better: Option<bool>) -> PointChange {
    let apart = a.range().significant_ratio(b.range()).is_some();
    let once = a.values.len() == 1 && b.values.len() == 1;
    let far =
        (b.median - a.median).abs() > a.median.abs() * if once { 0.0 } else { MIN_RELATIVE_CHANGE };
    if !(apart && far) {
        return PointChange::Noise;
    }
    match more_is_better {
        None => PointChange::Other,
        Some(more) if more == (b.median > a.median) => PointChange::Better,
        Some(_) => PointChange::Worse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Sample;

    fn test_point(values: &[f64]) -> ResultPoint {
        let mut outcome = ExperimentResult::default();
        for y in values {
            outcome.add_samples("mem", &[Sample::at_x("speed", "", 1.0, *y)]);
        }
        outcome.compute_medians_and_spreads();
        outcome.points.remove(0)
    }

    #[test]
    fn changes_are_distinguished_from_noise() {
        let a = test_point(&[10.0, 11.0, 12.0]);
        assert_eq!(
            classify_change(&a, &test_point(&[11.5, 12.5, 13.0]), Some(true)),
            PointChange::Noise
        );
        assert_eq!(
            classify_change(&a, &test_point(&[20.0, 21.0, 22.0]), Some(true)),
            PointChange::Better
        );
        assert_eq!(
            classify_change(&a, &test_point(&[20.0, 21.0, 22.0]), Some(false)),
            PointChange::Worse
        );
        assert_eq!(classify_change(&a, &test_point(&[5.0, 6.0, 7.0]), None), PointChange::Other);
        // A model is deterministic.
        assert_eq!(
            classify_change(&test_point(&[10.0]), &test_point(&[10.0]), Some(true)),
            PointChange::Noise
        );
        assert_eq!(
            classify_change(&test_point(&[10.0]), &test_point(&[10.1]), Some(true)),
            PointChange::Better
        );
    }
}
