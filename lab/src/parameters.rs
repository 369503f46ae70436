//! Parameters of experiments, and sizes of runs.

use anyhow::{Context, bail};

use crate::units;

/// A parameter of an experiment: a number, a size (`16K`), or a comma-separated list of
/// them.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Name on the command line.
    pub name: &'static str,
    /// Description.
    pub what: &'static str,
    /// Value for a quick run.
    pub quick: &'static str,
    /// Value of the paper.
    pub paper: &'static str,
}

/// Creates a parameter with its two values.
pub const fn new_parameter(
    name: &'static str,
    what: &'static str,
    quick: &'static str,
    paper: &'static str,
) -> Parameter {
    Parameter { name, what, quick, paper }
}

/// Size of a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RunSize {
    /// All experiments in a few minutes.
    Quick,
    /// Values of the papers.
    Paper,
    /// A multiple of the quick values, up to the paper's.
    Times(f64),
}

impl std::str::FromStr for RunSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "quick" => Ok(Self::Quick),
            "paper" => Ok(Self::Paper),
            other => match other.parse() {
                Ok(times) if times > 0.0 => Ok(Self::Times(times)),
                _ => Err("quick, paper, or how many times the quick one".into()),
            },
        }
    }
}

impl std::fmt::Display for RunSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Quick => f.write_str("quick"),
            Self::Paper => f.write_str("paper"),
            Self::Times(times) => write!(f, "{times}"),
        }
    }
}

/// Values from the command line: `name=value` or `experiment.name=value`.
#[derive(Clone, Debug, Default)]
pub struct ParameterSettings(Vec<(String, String)>);

impl ParameterSettings {
    /// Parses the values of `--set`.
    ///
    /// # Errors
    /// A text is no `key=value`.
    pub fn parse(settings: &[String]) -> anyhow::Result<Self> {
        let split = |text: &String| {
            let pair = text.split_once('=').map(|(k, v)| (k.to_string(), v.to_string()));
            pair.with_context(|| format!("--set {text}: key=value is needed"))
        };
        Ok(Self(settings.iter().map(split).collect::<anyhow::Result<_>>()?))
    }

    /// Refuses keys that are no parameter in `known` (experiment, parameter).
    ///
    /// # Errors
    /// Names the unknown key.
    pub fn check(&self, known: &[(&str, &str)]) -> anyhow::Result<()> {
        for (key, _) in &self.0 {
            let fits = |(experiment, name): &(&str, &str)| match key.split_once('.') {
                Some((of, key)) => of == *experiment && key == *name,
                None => key == name,
            };
            if !known.iter().any(fits) {
                bail!("--set {key}: none of these experiments has such a parameter");
            }
        }
        Ok(())
    }

    fn get(&self, experiment: &str, name: &str) -> Option<&str> {
        let fits = |key: &str| {
            key == name || key.split_once('.').is_some_and(|(e, n)| e == experiment && n == name)
        };
        self.0.iter().rev().find(|(key, _)| fits(key)).map(|(_, value)| value.as_str())
    }
}

/// Returns the value of a parameter in a run.
pub fn parameter_value(
    experiment: &str,
    parameter: &Parameter,
    size: RunSize,
    settings: &ParameterSettings,
) -> String {
    if let Some(set) = settings.get(experiment, parameter.name) {
        return set.to_string();
    }
    match size {
        RunSize::Quick => parameter.quick.to_string(),
        RunSize::Paper => parameter.paper.to_string(),
        RunSize::Times(times) => {
            let both = (units::parse_amount(parameter.quick), units::parse_amount(parameter.paper));
            match both {
                (Some(quick), Some(paper)) => {
                    let (least, most) = (quick.min(paper), quick.max(paper));
                    ((quick as f64 * times) as u64).clamp(least.min(1), most).max(1).to_string()
                }
                // Lists are not scaled, but replaced as a whole.
                _ if times >= 4.0 => parameter.paper.to_string(),
                _ => parameter.quick.to_string(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_override_and_sizes_scale() {
        let reads = new_parameter("reads", "", "100", "2000");
        let none = ParameterSettings::default();
        assert_eq!(parameter_value("x", &reads, RunSize::Quick, &none), "100");
        assert_eq!(parameter_value("x", &reads, RunSize::Paper, &none), "2000");
        assert_eq!(parameter_value("x", &reads, RunSize::Times(2.0), &none), "200");
        assert_eq!(parameter_value("x", &reads, RunSize::Times(99.0), &none), "2000");
        let set = ParameterSettings::parse(&["reads=7".into(), "y.reads=8".into()]).unwrap();
        assert_eq!(parameter_value("x", &reads, RunSize::Quick, &set), "7");
        assert_eq!(parameter_value("y", &reads, RunSize::Quick, &set), "8");
        assert!(set.check(&[("x", "reads")]).is_err());
        assert!(set.check(&[("x", "reads"), ("y", "reads")]).is_ok());
        assert!(ParameterSettings::parse(&["reads".into()]).is_err());
    }
}
