//! The report: a self-contained page, and its plots as files.

mod page;
mod png;
mod profile;

use std::path::{Path, PathBuf};

use crate::plot::{self, PlotTarget};
use crate::results::Results;

/// Writes the page and the plots into `dir`; returns the path of the page.
///
/// # Errors
/// Writing a file fails.
pub fn write(results: &Results, dir: &Path) -> anyhow::Result<PathBuf> {
    let plots = dir.join("plots");
    std::fs::create_dir_all(&plots)?;
    let mut figures = vec![];
    for outcome in &results.experiments {
        for figure in &outcome.figures {
            if let Some(svg) = plot::draw_svg(outcome, figure, PlotTarget::File) {
                let name = format!("{}-{}", outcome.name, figure.metric);
                std::fs::write(plots.join(format!("{name}.svg")), &svg)?;
                figures.push((plots.join(format!("{name}.png")), svg));
            }
        }
    }
    for (path, svg) in &figures {
        png::write(path, svg)?;
    }
    let page = dir.join("report.html");
    std::fs::write(&page, page::report_html(results))?;
    Ok(page)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::results::{ExperimentResult, Figure, FigureShape, SCHEMA_VERSION, Sample};

    /// Returns empty results.
    pub fn empty_results() -> Results {
        Results {
            schema: SCHEMA_VERSION,
            program: "test".into(),
            command: "run".into(),
            started: "today".into(),
            seconds: 1.0,
            size: "quick".into(),
            seed: 1,
            interrupted: false,
            machine: crate::machine::MachineDescription::detect(Path::new("/")),
            stopwatch_ns: 25.0,
            skipped: vec![],
            warnings: vec!["<script>".into()],
            experiments: vec![],
        }
    }

    #[test]
    fn report_files_round_trip_and_include_every_plot() {
        let mut results = empty_results();
        let mut outcome = ExperimentResult { name: "one".into(), ..ExperimentResult::default() };
        outcome.figures =
            vec![Figure::new(FigureShape::Lines, "speed", "Speed").with_y_axis("speed", "B/s")];
        outcome.add_samples(
            "mem",
            &[Sample::at_x("speed", "", 1.0, 2.0), Sample::at_x("speed", "", 2.0, 3.0)],
        );
        outcome.compute_medians_and_spreads();
        results.experiments.push(outcome);
        let dir = tempfile::tempdir().unwrap();
        results.write(dir.path()).unwrap();
        let page = write(&results, dir.path()).unwrap();
        assert_eq!(Results::read(dir.path()).unwrap(), results);
        let lines = std::fs::read_to_string(dir.path().join("measurements.jsonl")).unwrap();
        assert_eq!(lines.lines().count(), 2);
        assert!(dir.path().join("plots/one-speed.svg").exists());
        assert_eq!(dir.path().join("plots/one-speed.png").exists(), cfg!(feature = "png"));
        let page = std::fs::read_to_string(page).unwrap();
        assert!(page.contains("<polyline") && page.contains("&lt;script&gt;"));
        // The page is self-contained.
        assert!(!page.contains("src=") && !page.contains("<script>") && !page.contains("url("));
    }
}
