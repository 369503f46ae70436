//! Scales and their ticks.

use crate::results::FigureAxis;
use crate::units;

/// Maps values to positions.
pub struct AxisScale {
    log: bool,
    least: f64,
    most: f64,
    from: f64,
    to: f64,
}

impl AxisScale {
    /// Creates a scale for `values` between `from` and `to`. Linear scales start at 0.
    pub fn new(axis: &FigureAxis, values: &[f64], from: f64, to: f64) -> Self {
        let shown = values.iter().copied().filter(|v| v.is_finite() && (!axis.log || *v > 0.0));
        let (mut least, mut most) =
            shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)));
        if !least.is_finite() {
            (least, most) = if axis.log { (1.0, 10.0) } else { (0.0, 1.0) };
        }
        if axis.log {
            let (low, high) = (least.ln(), most.ln());
            let room = ((high - low) * 0.06).max(0.15);
            (least, most) = ((low - room).exp(), (high + room).exp());
        } else {
            least = least.min(0.0);
            most += (most - least).max(1e-9) * 0.06;
        }
        Self { log: axis.log, least, most, from, to }
    }

    /// Returns the position of a value; `None` if the logarithm is undefined.
    pub fn position(&self, value: f64) -> Option<f64> {
        let part = if self.log {
            (value > 0.0).then(|| (value / self.least).ln() / (self.most / self.least).ln())?
        } else {
            (value - self.least) / (self.most - self.least)
        };
        part.is_finite().then_some(self.from + (self.to - self.from) * part)
    }

    /// Returns the positions and labels of the ticks.
    pub fn ticks(&self, unit: &str, most_ticks: usize) -> Vec<(f64, String)> {
        let values = match (self.log, unit) {
            (true, "B") => self.power_ticks(2.0, most_ticks),
            (true, _) if self.most / self.least < 20.0 => self.one_two_five_ticks(most_ticks),
            (true, _) => self.power_ticks(10.0, most_ticks),
            (false, "B") => {
                let raw = (self.most - self.least) / most_ticks.max(1) as f64;
                self.multiples(raw.log2().ceil().exp2())
            }
            (false, _) => self.linear_ticks(most_ticks),
        };
        let text = |value: f64| match unit {
            "B" => units::format_bytes_short(value),
            "" => units::format_count(value),
            _ => units::format_in_unit(value, unit),
        };
        let at = |value: f64| Some((self.position(value)?, text(value)));
        values.into_iter().filter_map(at).collect()
    }

    fn power_ticks(&self, base: f64, most_ticks: usize) -> Vec<f64> {
        let first = (self.least.ln() / base.ln()).ceil() as i32;
        let last = (self.most.ln() / base.ln()).floor() as i32;
        let step = ((last - first) / most_ticks.max(1) as i32 + 1).max(1);
        (first..=last).step_by(step as usize).map(|power| base.powi(power)).collect()
    }

    /// Returns 1, 2 and 5 of each decade.
    fn one_two_five_ticks(&self, most_ticks: usize) -> Vec<f64> {
        let first = self.least.log10().floor() as i32;
        let last = self.most.log10().ceil() as i32;
        let all = (first..=last).flat_map(|p| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(p)));
        let inside: Vec<f64> = all.filter(|v| *v >= self.least && *v <= self.most).collect();
        let step = inside.len() / most_ticks.max(1) + 1;
        inside.into_iter().step_by(step).collect()
    }

    fn linear_ticks(&self, most_ticks: usize) -> Vec<f64> {
        let raw = (self.most - self.least) / most_ticks.max(1) as f64;
        let power = 10f64.powf(raw.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|m| m * power);
        self.multiples(steps.into_iter().find(|step| *step >= raw).unwrap_or(raw))
    }

    fn multiples(&self, step: f64) -> Vec<f64> {
        let first = (self.least / step).ceil() as i64;
        let last = (self.most / step).floor() as i64;
        (first..=last).map(|nth| nth as f64 * step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_axis(log: bool) -> FigureAxis {
        FigureAxis { label: String::new(), unit: String::new(), log }
    }

    #[test]
    fn positions_and_ticks() {
        let scale = AxisScale::new(&test_axis(false), &[0.0, 100.0], 0.0, 106.0);
        assert!((scale.position(50.0).unwrap() - 50.0).abs() < 1e-6);
        let ticks: Vec<_> = scale.ticks("", 5).into_iter().map(|(_, text)| text).collect();
        assert_eq!(ticks, ["0", "50", "100"]);
        let scale = AxisScale::new(&test_axis(true), &[4096.0, 1048576.0], 0.0, 1.0);
        let ticks: Vec<_> = scale.ticks("B", 10).into_iter().map(|(_, text)| text).collect();
        assert_eq!(ticks.first().map(String::as_str), Some("4K"));
        assert!(scale.position(0.0).is_none());
        for (least, most) in [(1.0, 1.0), (0.001, 5e9), (3.0, 4.0)] {
            for log in [false, true] {
                let scale = AxisScale::new(&test_axis(log), &[least, most], 0.0, 1.0);
                let ticks = scale.ticks("", 8);
                assert!(ticks.len() <= 12, "{least} {most} {log}: {}", ticks.len());
            }
        }
    }
}
