//! The HTML page.

use std::fmt::Write;

use super::profile;
use crate::plot::{self, PlotTarget, escape_xml};
use crate::results::{
    ExperimentResult, Figure, MAX_PERCENT_SPREAD, ResultPoint, Results, ValueRange, unique_in_order,
};
use crate::store_profile::StoreProfile;
use crate::{terminal, units};

const PAGE_CSS: &str = include_str!("page.css");

/// Returns the whole page.
pub fn report_html(results: &Results) -> String {
    let mut page = String::new();
    let _ = write!(
        page,
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <link rel=\"icon\" href=\"data:,\"><title>How this machine stores: {date}</title>\
         <style>{PAGE_CSS}</style></head><body><main>\
         <h1>How this machine stores</h1>\
         <p class=\"soft\">{date} · {program} · size {size} · seed {seed} · {seconds:.0} s</p>",
        date = escape_xml(&results.started),
        program = escape_xml(&results.program),
        size = escape_xml(&results.size),
        seed = results.seed,
        seconds = results.seconds,
    );
    if results.interrupted {
        page += "<p class=\"warn\">This run was stopped before its end.</p>";
    }
    page += &profile_section_html(results);
    page += &table_of_contents_html(results);
    page += &machine_html(results);
    let mut paper = "";
    for outcome in &results.experiments {
        if outcome.paper != paper {
            paper = &outcome.paper;
            let _ = write!(page, "<h2>{}</h2>", escape_xml(paper));
        }
        page += &experiment_html(outcome);
    }
    page += "</main></body></html>\n";
    page
}

fn profile_section_html(results: &Results) -> String {
    let words = profile::profile_text(results);
    if words.profile.is_empty() {
        return String::new();
    }
    let count = match words.profile.len() {
        1 => "one line".into(),
        count => format!("{} lines", units::count_in_words(count)),
    };
    let mut text = format!(
        "<h2 id=\"profile\">The storage of this machine, in {count}</h2><ol class=\"profile\">",
    );
    for line in &words.profile {
        let _ = write!(text, "<li>{}</li>", escape_xml(line));
    }
    text += "</ol>";
    if !words.guidance.is_empty() {
        text += "<h2 id=\"guidance\">Good, bad and ugly: what to do about it</h2>";
    }
    for (name, lines) in &words.guidance {
        let _ = write!(
            text,
            "<div class=\"card\"><h4>{}</h4>{}</div>",
            escape_xml(name),
            list_html(lines)
        );
    }
    text
}

fn list_html(lines: &[String]) -> String {
    let items: String = lines.iter().map(|line| format!("<li>{}</li>", escape_xml(line))).collect();
    if items.is_empty() { items } else { format!("<ul>{items}</ul>") }
}

fn table_of_contents_html(results: &Results) -> String {
    let mut text = String::from("<h2>Experiments</h2><nav>");
    for outcome in &results.experiments {
        let name = escape_xml(&outcome.name);
        let _ = write!(text, "<a href=\"#{name}\">{name}</a>");
    }
    text + "</nav>"
}

fn machine_html(results: &Results) -> String {
    let m = &results.machine;
    let clock = format!("{:.0} ns for one look", results.stopwatch_ns);
    let rows = [
        ("Processor", format!("{} x {}", m.cpus, m.cpu)),
        ("Clock of the CPU set by", m.governor.clone()),
        ("Memory", format!("{} MiB, swap {} MiB", m.memory_mib, m.swap_mib)),
        ("Kernel", m.kernel.clone()),
        ("Virtual machine", if m.virtual_machine { "yes" } else { "no" }.into()),
        ("Load before", m.load.clone()),
        ("Device", format!("{}; it says that it turns: {}", m.device, m.rotational)),
        ("Sectors", format!("{} bytes (logical / physical)", m.sectors)),
        ("File system", m.file_system.clone()),
        ("Scheduler", m.scheduler.clone()),
        ("Read-ahead", format!("{} KiB", m.read_ahead_kib)),
        ("Stopwatch", clock),
        ("Command", results.command.clone()),
    ];
    let mut text = String::from("<h2 id=\"machine\">The machine, and what to know</h2><dl>");
    for (name, value) in rows {
        let _ = write!(text, "<dt>{name}</dt><dd>{}</dd>", escape_xml(&value));
    }
    text += "</dl>";
    if !results.warnings.is_empty() {
        let _ = write!(text, "<h4 class=\"warn\">Warnings</h4>{}", list_html(&results.warnings));
    }
    if !results.skipped.is_empty() {
        let line = |s: &crate::results::SkippedSubject| {
            format!("{} for {}: needs {}", s.subject, s.experiment, s.needs)
        };
        let lines: Vec<String> = results.skipped.iter().map(line).collect();
        let _ = write!(text, "<h4>Skipped on this machine</h4>{}", list_html(&lines));
    }
    text
}

fn experiment_html(outcome: &ExperimentResult) -> String {
    let name = escape_xml(&outcome.name);
    let mut text = format!(
        "<section class=\"one\" id=\"{name}\"><h3>{name}</h3><p>{}</p>",
        escape_xml(&outcome.asks)
    );
    for figure in &outcome.figures {
        if let Some(svg) = plot::draw_svg(outcome, figure, PlotTarget::Page) {
            let _ = write!(
                text,
                "<figcaption>{}</figcaption><figure>{svg}</figure>{}",
                escape_xml(&figure.title),
                legend_html(outcome, figure),
            );
            text += &ratios_html(outcome, figure);
        }
    }
    let _ = write!(text, "<dl><dt>The paper found</dt><dd>{}</dd>", escape_xml(&outcome.finding));
    if !outcome.found.is_empty() {
        let found: Vec<String> = outcome.found.iter().map(|line| escape_xml(line)).collect();
        let _ = write!(text, "<dt>Found here</dt><dd>{}</dd>", found.join("<br>"));
    }
    if !outcome.explains.is_empty() && !outcome.points.is_empty() {
        let _ = write!(text, "<dt>Why</dt><dd>{}</dd>", escape_xml(&outcome.explains));
    }
    text += "</dl>";
    text += &store_profiles_html(outcome);
    text += &list_html(&outcome.notes);
    let _ = write!(text, "<pre>{}</pre>", escape_xml(&outcome.command));
    text += &details_html(outcome);
    text + "</section>"
}

/// Returns the store profiles with reasons, and their files.
fn store_profiles_html(outcome: &ExperimentResult) -> String {
    let one = |profile: &StoreProfile| {
        let file = escape_xml(&profile.file_name());
        format!(
            "<h4>The profile for a store on {}: {}</h4>{}\
             <p>In <a href=\"{file}\">{file}</a>:</p>\
             <pre>draconis store create --profile {file} STORE</pre>",
            escape_xml(&profile.subject),
            escape_xml(&profile.describe()),
            list_html(&profile.why),
        )
    };
    outcome.profiles.iter().map(one).collect()
}

fn legend_html(outcome: &ExperimentResult, figure: &Figure) -> String {
    let legend = plot::legend_entries(outcome, figure);
    if legend.is_empty() {
        return String::new();
    }
    let mut text = String::from("<ul class=\"legend\">");
    for (name, colour, dashes) in legend {
        let _ = write!(
            text,
            "<li><svg viewBox=\"0 0 26 8\" aria-hidden=\"true\"><line x1=\"0\" x2=\"26\" y1=\"4\" \
             y2=\"4\" stroke=\"var(--c{})\" stroke-width=\"3\" stroke-dasharray=\"{dashes}\"/>\
             </svg>{}</li>",
            colour % 8,
            escape_xml(&name),
        );
    }
    text + "</ul>"
}

fn ratios_html(outcome: &ExperimentResult, figure: &Figure) -> String {
    let all = terminal::mean_ratios(outcome, figure);
    let Some((_, _, base)) = all.first() else { return String::new() };
    let one = |(subject, ratio, _): &(&str, Option<f64>, &str)| match ratio {
        Some(ratio) => format!("{subject} {}", units::format_significant(*ratio)),
        None => format!("{subject} not told apart"),
    };
    let list: Vec<String> = all.iter().map(one).collect();
    format!("<p class=\"soft\">times {}: {}</p>", escape_xml(base), escape_xml(&list.join(", ")))
}

/// Returns parameters, subjects and all values.
fn details_html(outcome: &ExperimentResult) -> String {
    if outcome.points.is_empty() {
        return String::new();
    }
    let mut text = String::from("<details><summary>Parameters, subjects, numbers</summary><dl>");
    for used in &outcome.parameters {
        let (name, value) = (escape_xml(&used.name), escape_xml(&used.value));
        let _ = write!(text, "<dt>{name}</dt><dd>{value} ({})</dd>", escape_xml(&used.what));
    }
    for subject in &outcome.subjects {
        let _ = write!(
            text,
            "<dt>{}</dt><dd>{}</dd>",
            escape_xml(&subject.name),
            escape_xml(&subject.what)
        );
    }
    text += "</dl>";
    for figure in &outcome.figures {
        text += &values_table_html(outcome, figure);
    }
    text + "</details>"
}

/// Returns the spread as a percentage of the median, or the range if the spread is large.
fn format_spread(point: &ResultPoint, unit: &str) -> String {
    match point.range() {
        _ if point.spread <= MAX_PERCENT_SPREAD => format!("{:.0} %", point.spread * 100.0),
        ValueRange { least, most, .. } => {
            format!(
                "{} to {}",
                units::format_in_unit(least, unit),
                units::format_in_unit(most, unit)
            )
        }
    }
}

/// Maximum number of rows in the page; the files have all.
const MAX_TABLE_ROWS: usize = 150;

fn values_table_html(outcome: &ExperimentResult, figure: &Figure) -> String {
    let of = || outcome.points.iter().filter(|point| point.metric == figure.metric);
    let count = of().count();
    if count == 0 {
        return String::new();
    }
    if count > MAX_TABLE_ROWS {
        return format!("<p class=\"soft\">{count} points: see measurements.jsonl</p>");
    }
    let mut text = format!(
        "<h4>{}</h4><div class=\"scroll\"><table><tr><th>subject</th><th>series</th><th>{}</th>\
         <th>median</th><th>spread</th><th></th></tr>",
        escape_xml(&figure.title),
        escape_xml(if figure.x.label.is_empty() { "of" } else { &figure.x.label }),
    );
    for subject in unique_in_order(of().map(|point| point.subject.as_str())) {
        for point in of().filter(|point| point.subject == subject) {
            let place = match &point.label {
                Some(label) => label.clone(),
                None => units::format_in_unit(point.x, &figure.x.unit),
            };
            let spread = match point.values.len() {
                1 => "once".into(),
                _ => format_spread(point, &figure.y.unit),
            };
            let cold = if point.cold == Some(false) { "not cold" } else { "" };
            let _ = write!(
                text,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">\
                 {spread}</td><td>{cold}</td></tr>",
                escape_xml(subject),
                escape_xml(&point.series),
                escape_xml(&place),
                escape_xml(&units::format_in_unit(point.median, &figure.y.unit)),
            );
        }
    }
    text + "</table></div>"
}
