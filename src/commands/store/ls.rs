//! `draconis store ls`

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use draconis_service::store_process::{self, ObjectEntry};
use serde::Serialize;

use super::follow::{FollowArgs, print_changes};
use super::open::{self, open_readable, with_context};
use crate::text::escape_control_chars;

/// List objects with size, unshared bytes and names.
///
/// Unshared bytes are those not shared with the parent. If disks are mounted, the store process
/// lists the store. A terminal gets a table; otherwise fields end with tabs.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    follow: FollowArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    if let Some(interval) = arguments.follow.follow {
        return print_changes(device, interval, |store| {
            let mut text = vec![];
            // Writing to memory cannot fail.
            let form = ListForm::new(arguments.json);
            let _ = write_list(&store_process::list_objects(store)?, form, &mut text);
            Ok(text)
        });
    }
    let list = match open::list_from_store_process(device)? {
        Some(list) => list,
        None => store_process::list_objects(&open_readable(device)?)
            .map_err(|error| with_context(device, error))?,
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    write_list(&list, ListForm::new(arguments.json), &mut out)?;
    out.flush()?;
    Ok(())
}

/// Form of the list.
#[derive(Clone, Copy)]
enum ListForm {
    Json,
    /// Columns with a header, for a terminal.
    Table,
    /// Fields with tabs between them, for programs.
    Tabs,
}

impl ListForm {
    fn new(is_json: bool) -> Self {
        match is_json {
            true => Self::Json,
            false if std::io::stdout().is_terminal() => Self::Table,
            false => Self::Tabs,
        }
    }
}

fn write_list(list: &[ObjectEntry], form: ListForm, out: &mut impl Write) -> anyhow::Result<()> {
    match form {
        ListForm::Json => {
            let all: Vec<ObjectJson> = list.iter().map(ObjectJson::from_entry).collect();
            writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
        }
        ListForm::Table => {
            writeln!(out, "{:>8} {:>16} {:>16}  NAMES", "OBJECT", "BYTES", "UNSHARED")?;
            for ObjectJson { object, len_bytes, own_bytes, names, .. } in
                list.iter().map(ObjectJson::from_entry)
            {
                let own = own_bytes.map_or(String::new(), |own| own.to_string());
                let line = format!("{object:>8} {len_bytes:>16} {own:>16}  {}", names.join(" "));
                writeln!(out, "{}", line.trim_end())?;
            }
        }
        ListForm::Tabs => {
            for ObjectJson { object, len_bytes, own_bytes, names, .. } in
                list.iter().map(ObjectJson::from_entry)
            {
                write!(out, "{object}\t{len_bytes}")?;
                own_bytes.map_or(Ok(()), |own| write!(out, "\t{own}"))?;
                names.iter().try_for_each(|name| write!(out, "\t{name}"))?;
                writeln!(out)?;
            }
        }
    }
    Ok(())
}

#[derive(Serialize)]
struct ObjectJson {
    object: u64,
    len_bytes: u64,
    /// Bytes that a disk or snapshot does not share with its parent.
    #[serde(skip_serializing_if = "Option::is_none")]
    own_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    over: Option<String>,
    names: Vec<String>,
}

impl ObjectJson {
    fn from_entry(listed: &ObjectEntry) -> Self {
        Self {
            object: listed.object,
            len_bytes: listed.len_bytes,
            own_bytes: listed.own_bytes,
            over: listed.over.as_deref().map(escape_control_chars),
            names: listed.names.iter().map(|name| escape_control_chars(name)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_gets_a_header() {
        let entry = |object, own_bytes, names: &[&str]| ObjectEntry {
            object,
            len_bytes: 4096,
            own_bytes,
            over: None,
            names: names.iter().map(|name| name.as_bytes().to_vec()).collect(),
        };
        let list = [entry(1, None, &[]), entry(12, Some(512), &["disk", "disk@old"])];
        let write = |form| {
            let mut text = vec![];
            write_list(&list, form, &mut text).unwrap();
            String::from_utf8(text).unwrap()
        };
        let table = "  OBJECT            BYTES         UNSHARED  NAMES\n       1             4096\n      12             4096              512  disk disk@old\n";
        assert_eq!(write(ListForm::Table), table);
        assert_eq!(write(ListForm::Tabs), "1\t4096\n12\t4096\t512\tdisk\tdisk@old\n");
    }
}
