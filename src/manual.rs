//! Manual pages, generated from the clap definition of each command, a synopsis with the values of
//! options, and examples.
//!
//! Law: equal sources give equal pages. Their date is the release date, or
//! SOURCE_DATE_EPOCH.

mod examples;

use anyhow::Context;
use clap::{Arg, ArgAction, Command};
use clap_mangen::Man;
use jiff::Timestamp;

use crate::exit_status;

/// Release date of this version.
const RELEASE_DATE: &str = "2026-11-22";
/// Title of the manual, in the centre of the page header.
const MANUAL_TITLE: &str = "Draconis Manual";

/// A manual page.
pub struct ManPage {
    pub file_name: String,
    pub text: Vec<u8>,
}

/// Returns the pages of a command and its visible subcommands.
pub fn generate_pages(command: Command) -> anyhow::Result<Vec<ManPage>> {
    let date = manual_date()?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut pages = vec![];
    let mut stack = vec![command];
    while let Some(command) = stack.pop() {
        pages.push(generate_page(&command, &date)?);
        stack.extend(command.get_subcommands().filter(|below| !below.is_hide_set()).cloned());
    }
    Ok(pages)
}

fn manual_date() -> anyhow::Result<String> {
    let Ok(text) = std::env::var("SOURCE_DATE_EPOCH") else { return Ok(RELEASE_DATE.to_string()) };
    let wrong = || format!("SOURCE_DATE_EPOCH={text}: not a number of seconds");
    let stamp = Timestamp::from_second(text.parse().with_context(wrong)?).with_context(wrong)?;
    Ok(stamp.strftime("%Y-%m-%d").to_string())
}

fn generate_page(command: &Command, date: &str) -> anyhow::Result<ManPage> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let version = format!("draconis {}", command.get_version().unwrap_or_default());
    let shown = command.clone().override_usage(format_synopsis(command));
    let man = Man::new(shown).title(&name).date(date).source(version).manual(MANUAL_TITLE);
    let mut text = vec![];
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        man.render_subcommands_section(&mut text)?;
    }
    if let Some(notes) = command.get_after_long_help().or(command.get_after_help()) {
        text.extend_from_slice(b".SH NOTES\n");
        push_verbatim(&mut text, &notes.to_string());
    }
    text.extend_from_slice(b".SH EXIT STATUS\n");
    let path = command.get_bin_name().unwrap_or_default();
    let path = path.strip_prefix("draconis").unwrap_or_default().trim_start();
    push_verbatim(&mut text, &exit_status::statuses_of(path).join("\n"));
    text.extend_from_slice(b".SH EXAMPLES\n");
    let own = examples::COMMAND_EXAMPLES.iter().find(|(of, _)| *of == name);
    let (_, examples) = own.with_context(|| format!("{name}: no examples"))?;
    for (what, line) in *examples {
        text.extend_from_slice(format!("{}:\n.PP\n.RS 4\n", escape_roff_line(what)).as_bytes());
        push_verbatim(&mut text, line);
        text.extend_from_slice(b".RE\n.PP\n");
    }
    if name != "draconis" {
        text.extend_from_slice(b".SH SEE ALSO\n\\fBdraconis\\fR(1)\n");
    }
    Ok(ManPage { file_name: format!("{name}.1"), text })
}

/// Adds lines without filling.
fn push_verbatim(text: &mut Vec<u8>, lines: &str) {
    text.extend_from_slice(b".nf\n");
    for line in lines.lines() {
        text.extend_from_slice(escape_roff_line(line).as_bytes());
        text.push(b'\n');
    }
    text.extend_from_slice(b".fi\n");
}

/// Escapes text for troff.
fn escape_roff_line(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    if line.starts_with('.') { format!("\\&{line}") } else { line }
}

/// Returns the synopsis of a command, without global options.
fn format_synopsis(command: &Command) -> String {
    let mut words = vec![command.get_bin_name().unwrap_or(command.get_name()).to_owned()];
    let everywhere = ["help", "version", "verbose"];
    let is_everywhere =
        |one: &Arg| everywhere.contains(&one.get_id().as_str()) || one.is_hide_short_help_set();
    let options = command.get_opts().chain(command.get_arguments().filter(|one| is_flag(one)));
    let mut options: Vec<&Arg> = options.filter(|one| !is_everywhere(one)).collect();
    // Flags first, then options; those with a short name before those without.
    options.sort_by_key(|one| (!is_flag(one), one.get_short().is_none()));
    options.dedup_by_key(|one| one.get_id().clone());
    words.extend(options.iter().filter(|one| !one.is_hide_set()).map(|one| format_option(one)));
    words.extend(command.get_positionals().map(format_positional));
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        words.push("COMMAND ...".to_owned());
    }
    words.join(" ")
}

fn is_flag(one: &Arg) -> bool {
    !one.is_positional() && !one.get_num_args().is_some_and(|range| range.takes_values())
}

fn format_option(one: &Arg) -> String {
    let short = one.get_short().map(|short| format!("-{short}"));
    let long = one.get_long().map(|long| format!("--{long}"));
    let mut text = short.into_iter().chain(long).collect::<Vec<_>>().join("|");
    if !is_flag(one) {
        text = format!("{text} {}", format_option_value(one));
    }
    let many = if matches!(one.get_action(), ArgAction::Append) { "..." } else { "" };
    if one.is_required_set() { format!("{text}{many}") } else { format!("[{text}]{many}") }
}

/// Returns the value of an option: its name, or the few possible values.
fn format_option_value(one: &Arg) -> String {
    let known = one.get_possible_values();
    let names: Vec<&str> = known.iter().map(|value| value.get_name()).collect();
    match one.get_value_names() {
        _ if !names.is_empty() => names.join("|"),
        Some(given) => given.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" "),
        None => one.get_id().as_str().to_uppercase(),
    }
}

fn format_positional(one: &Arg) -> String {
    let many = one.get_num_args().is_some_and(|range| range.max_values() > 1);
    let text = format!("{}{}", format_option_value(one), if many { "..." } else { "" });
    if one.is_required_set() { text } else { format!("[{text}]") }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn examples_match_commands() {
        let pages = generate_pages(Cli::command()).unwrap();
        let names: Vec<&str> =
            pages.iter().map(|page| page.file_name.trim_end_matches(".1")).collect();
        for (name, examples) in examples::COMMAND_EXAMPLES {
            assert!(names.contains(name), "{name}");
            assert!(!examples.is_empty(), "{name}");
        }
        assert_eq!(names.len(), examples::COMMAND_EXAMPLES.len());
    }

    #[test]
    fn synopsis_shows_option_values() {
        let mut command = Cli::command();
        command.build();
        let of = |name: &str| format_synopsis(command.find_subcommand(name).unwrap());
        assert_eq!(
            of("ls"),
            "draconis ls [-l] [-h] [-a] [-R] [-d] [--deleted] [--json] [--offset BYTES] \
             [--partition N] [--backing FILE]... IMAGE[:/path]..."
        );
        assert!(of("tar").contains("[--sparse auto|always|never]"), "{}", of("tar"));
        assert!(of("truncate").contains(" -s|--size SIZE "), "{}", of("truncate"));
        assert!(of("kv").ends_with(" COMMAND ..."), "{}", of("kv"));
        assert_eq!(escape_roff_line(".a-b\\'"), "\\&.a\\-b\\e\\(aq");
    }
}
