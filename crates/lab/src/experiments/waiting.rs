//! Experiments that are known and cannot run yet.

use super::{Experiment, Paper};
use crate::context::Context;
use crate::parameters::Parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, Subject};

/// The object store's own operations.
pub struct Objects;

impl Experiment for Objects {
    fn name(&self) -> &'static str {
        "objects"
    }

    fn paper(&self) -> Paper {
        Paper::Draconis
    }

    fn asks(&self) -> &'static str {
        "How fast are the object store's put, append, update and read, by size, synchronous and \
         not, in the log and the copy-on-write layout, and what does it write for each byte?"
    }

    fn finding(&self) -> &'static str {
        "Section 4.2: proposed, never measured."
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[]
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Lines, "rate", "Operations in a second by size")
                .x("object", "B")
                .y("operations", "/s")
                .log_x()
                .log_y(),
        ]
    }

    fn subjects(&self) -> &'static [&'static str] {
        &["file", "model:hdd", "model:ssd"]
    }

    fn takes(&self, kind: Kind) -> bool {
        matches!(kind, Kind::Raw | Kind::Model)
    }

    fn waits(&self) -> Option<&'static str> {
        Some("the object store")
    }

    fn run(&self, _: &Context, _: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        Ok(vec![])
    }

    fn found(&self, _: Points<'_>) -> Vec<String> {
        vec![]
    }
}
