//! The report: one page that needs nothing else, and its plots as files.

mod page;
mod profile;

use std::path::{Path, PathBuf};

use crate::plot::{self, Paint};
use crate::results::Results;

/// Writes the page and the plots into `dir`; where the page is.
///
/// # Errors
/// What the system says.
pub fn write(results: &Results, dir: &Path) -> anyhow::Result<PathBuf> {
    let plots = dir.join("plots");
    std::fs::create_dir_all(&plots)?;
    let mut figures = vec![];
    for outcome in &results.experiments {
        for figure in &outcome.figures {
            if let Some(svg) = plot::svg(outcome, figure, Paint::File) {
                let name = format!("{}-{}", outcome.name, figure.metric);
                std::fs::write(plots.join(format!("{name}.svg")), &svg)?;
                figures.push((plots.join(format!("{name}.png")), svg));
            }
        }
    }
    write_png(&figures)?;
    let page = dir.join("report.html");
    std::fs::write(&page, page::html(results))?;
    Ok(page)
}

fn write_png(figures: &[(PathBuf, String)]) -> anyhow::Result<()> {
    let _ = figures;
    Ok(())
}
