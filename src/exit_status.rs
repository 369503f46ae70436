//! Exit statuses of the commands, and what help texts and manual pages say of them.
//!
//! Law: a status other than 0, 1 and 2 is a constant here, with a row of the command that returns it.

use clap::Command;

/// Damage, as of `e2fsck`: found by a check, left by a repair, lost by a salvage.
pub const DAMAGED: u8 = 4;
/// A repair has changed the volume, as of `e2fsck`.
pub const REPAIRED: u8 = 1;
/// A check or a repair could not be made, as of `e2fsck`.
pub const OPERATIONAL_ERROR: u8 = 8;

type Statuses = &'static [(u8, &'static str)];

/// Statuses of commands that have their own.
const OWN: &[(&str, Statuses)] = &[
    ("check", CHECKED),
    ("export", &[(0, "ended by a signal or --once"), (1, "failure"), WITH_RUN]),
    ("get", COPIED),
    (
        "repair",
        &[
            (0, "nothing to do"),
            (REPAIRED, "repaired"),
            (DAMAGED, "damage is left: all of it, or what has no fix"),
            (OPERATIONAL_ERROR, "repair failed"),
        ],
    ),
    ("rescue", &[(0, "everything was copied"), (1, "something is missing or the command failed")]),
    ("store check", CHECKED),
    ("store salvage", &[(0, "complete"), (1, "failure"), (DAMAGED, "data lost")]),
    ("tar", COPIED),
    ("undelete", &[(0, "success"), (1, "failure (also if a copied file is not whole)")]),
];
const CHECKED: Statuses =
    &[(0, "clean"), (DAMAGED, "damaged"), (OPERATIONAL_ERROR, "check failed")];
const COPIED: Statuses = &[(0, "success"), (1, "failure (also if something was not copied)")];
const WITH_RUN: (u8, &str) = (ANY, "of COMMAND with --run");
/// Statuses of all other commands.
const USUAL: Statuses = &[(0, "success"), (1, "failure")];
/// Status of a command line that makes no sense: clap's.
const USAGE: (u8, &str) = (2, "invalid command line");
/// What ends any command.
const OF_ALL: Statuses = &[
    (130, "after SIGINT (Ctrl-C)"),
    (143, "after SIGTERM"),
    (141, "if the reader of the output is gone"),
];
/// A status that another program chooses.
const ANY: u8 = u8::MAX;

/// Returns the statuses of a command, named as on the command line, and what they mean.
pub fn statuses_of(command: &str) -> Vec<String> {
    let own = OWN.iter().find(|(of, _)| *of == command).map_or(USUAL, |(_, statuses)| statuses);
    let shown = |(status, what): &(u8, &str)| match *status {
        ANY => format!("that {what}"),
        status => format!("{status} {what}"),
    };
    // On the first page alone.
    let of_all = if command.is_empty() { OF_ALL } else { &[] };
    own.iter().chain([&USAGE]).chain(of_all).map(shown).collect()
}

/// Returns the statuses of a command in a sentence.
fn describe(command: &str) -> String {
    format!("{}.", statuses_of(command).join(", "))
}

/// Adds the statuses to the help texts of a command.
pub fn add_to_help(name: &str, command: Command) -> Command {
    let line = format!("Exit status: {}", describe(name));
    let with_line = |text: Option<&clap::builder::StyledStr>| match text {
        Some(text) => format!("{text}\n{line}"),
        None => line.clone(),
    };
    let short = with_line(command.get_after_help());
    let long = command.get_after_long_help().map(|text| with_line(Some(text)));
    let command = command.after_help(short);
    match long {
        Some(long) => command.after_long_help(long),
        None => command,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_described_in_order() {
        assert_eq!(describe("ls"), "0 success, 1 failure, 2 invalid command line.");
        let check = "0 clean, 4 damaged, 8 check failed, 2 invalid command line.";
        assert_eq!(describe("store check"), check);
        assert!(describe("export").contains("that of COMMAND with --run"));
        for (name, _) in OWN {
            assert!(crate::cli::all_command_names().contains(&(*name).to_owned()), "{name}");
        }
    }

    #[test]
    fn each_help_text_has_the_statuses() {
        for name in crate::cli::all_command_names() {
            let mut found = crate::cli::command();
            for word in name.split(' ') {
                found = found.find_subcommand(word).unwrap().clone();
            }
            for help in [found.render_help(), found.render_long_help()] {
                assert!(help.to_string().contains("Exit status: 0 "), "{name}: {help}");
            }
        }
    }
}
