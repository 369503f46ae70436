//! Comparison of two results: changes and noise.
//!
//! A value has changed if all repetitions of one run lie beyond all repetitions of the other, and
//! by more than [`MIN_CHANGE`]. With single repetitions, as on models, which are deterministic,
//! any difference counts.

use crate::results::{Figure, Outcome, Point, Results};
use crate::stats;
use crate::units;

/// Minimum difference of medians that counts as a change, if values are noisy.
const MIN_CHANGE: f64 = 0.05;

/// Change of one value.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Change {
    Better,
    Worse,
    /// Changed, where neither direction is better.
    Other,
    Noise,
}

impl Change {
    fn mark(self) -> &'static str {
        match self {
            Self::Better => "+",
            Self::Worse => "-",
            Self::Other => "*",
            Self::Noise => " ",
        }
    }
}

/// Formats the comparison as text.
pub fn text(a: &Results, b: &Results) -> String {
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
            let (lines, both, moved) = compare(of_a, of_b, figure);
            (changed, all) = (changed + moved, all + both);
            if both > 0 {
                text += &lines;
            }
        }
    }
    let names = |one: &Outcome| !a.experiments.iter().any(|other| other.name == one.name);
    for only in b.experiments.iter().filter(|one| names(one)) {
        text += &format!("\n{}: only in B\n", only.name);
    }
    text + &format!("\n{changed} of {all} values changed beyond the noise (+ better, - worse)\n")
}

/// Returns the lines of a figure, the number of common values, and the number of changed ones.
fn compare(a: &Outcome, b: &Outcome, figure: &Figure) -> (String, usize, usize) {
    let (mut rows, mut ratios, mut both, mut changed) = (String::new(), vec![], 0, 0);
    for of_a in a.points.iter().filter(|point| point.metric == figure.metric) {
        let same = |p: &&Point| {
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
        let change = judge(of_a, of_b, figure.more_is_better);
        if change == Change::Noise {
            continue;
        }
        changed += 1;
        let place = match &of_a.label {
            Some(label) => label.clone(),
            None => units::in_unit(of_a.x, &figure.x.unit),
        };
        rows += &format!(
            "  {} {} {} {place}: {} -> {}, {} x\n",
            change.mark(),
            of_a.subject,
            of_a.series,
            units::in_unit(of_a.median, &figure.y.unit),
            units::in_unit(of_b.median, &figure.y.unit),
            units::significant(of_b.median / of_a.median),
        );
    }
    let mean = stats::geometric_mean(&ratios);
    let mean =
        mean.map_or_else(String::new, |mean| format!(", B is {} x A", units::significant(mean)));
    let head = format!("\n{}, {}: {changed} of {both} changed{mean}\n", a.name, figure.title);
    (head + &rows, both, changed)
}

fn judge(a: &Point, b: &Point, more_is_better: Option<bool>) -> Change {
    let apart = a.range().times(b.range()).is_some();
    let once = a.values.len() == 1 && b.values.len() == 1;
    let far = (b.median - a.median).abs() > a.median.abs() * if once { 0.0 } else { MIN_CHANGE };
    if !(apart && far) {
        return Change::Noise;
    }
    match more_is_better {
        None => Change::Other,
        Some(more) if more == (b.median > a.median) => Change::Better,
        Some(_) => Change::Worse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Sample;

    fn point(values: &[f64]) -> Point {
        let mut outcome = Outcome::default();
        for y in values {
            outcome.add("mem", &[Sample::at("speed", "", 1.0, *y)]);
        }
        outcome.finalize();
        outcome.points.remove(0)
    }

    #[test]
    fn changes_are_told_from_noise() {
        let a = point(&[10.0, 11.0, 12.0]);
        assert_eq!(judge(&a, &point(&[11.5, 12.5, 13.0]), Some(true)), Change::Noise);
        assert_eq!(judge(&a, &point(&[20.0, 21.0, 22.0]), Some(true)), Change::Better);
        assert_eq!(judge(&a, &point(&[20.0, 21.0, 22.0]), Some(false)), Change::Worse);
        assert_eq!(judge(&a, &point(&[5.0, 6.0, 7.0]), None), Change::Other);
        // A model is deterministic.
        assert_eq!(judge(&point(&[10.0]), &point(&[10.0]), Some(true)), Change::Noise);
        assert_eq!(judge(&point(&[10.0]), &point(&[10.1]), Some(true)), Change::Better);
    }
}
