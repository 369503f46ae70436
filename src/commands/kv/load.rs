//! `draconis kv load`

use std::io::{BufRead, BufReader};
use std::path::PathBuf;

use anyhow::{anyhow, bail};
use clap::Args;
use draconis_objects::Error;
use draconis_objects::kv::{Batch, Kv};
use draconis_types::path_bytes::ShowPath;

use super::form::TextEncoding;
use crate::commands::store::copy::ObjectInput;
use crate::commands::store::open::{StoreWriteArgs, close_store, open_writable, with_context};
use crate::progress::{ByteProgress, ProgressMode};

/// Load tab-separated keys and values from a file.
///
/// In keys and values \\ is a backslash, \t a tab, \n a newline, \r a carriage return and \xHH the
/// byte of that number, as `draconis kv scan` writes them.
///
/// Commits every 1 MiB of input. After power loss a prefix of the lines is present.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Read keys and values as hexadecimal digits, two for each byte.
    #[arg(long)]
    hex: bool,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    store: PathBuf,
    /// Input file; - for standard input.
    #[arg(value_name = "FILE|-")]
    file: PathBuf,
}

/// Input bytes per batch.
const BATCH_BYTES: usize = 1 << 20;

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let from = ObjectInput::open(Some(&arguments.file), &arguments.store)?;
    let kv = Kv::new(open_writable(&arguments.store, arguments.write.force)?);
    let mut from = BufReader::with_capacity(BATCH_BYTES, from);
    let mut progress = ByteProgress::new(arguments.progress, from.get_ref().len_bytes());
    let (mut line, mut number, mut batch) = (vec![], 0u64, Batch::new());
    let form = TextEncoding::from_hex_flag(arguments.hex);
    // Number of lines loaded.
    let mut loaded = 0u64;
    // Lines before an invalid one are kept; the error names the invalid line.
    let wrong = loop {
        line.clear();
        let got = from.read_until(b'\n', &mut line)?;
        if got == 0 {
            break None;
        }
        number += 1;
        progress.add(got as u64);
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        match parse_pair(form, text) {
            Ok((key, value)) => batch.put(&key, &value),
            Err(why) => break Some(why),
        }
        if batch.len_bytes() >= BATCH_BYTES {
            write_lines(&kv, arguments, std::mem::take(&mut batch), loaded)?;
            loaded = number;
        }
    };
    write_lines(&kv, arguments, batch, loaded)?;
    close_store(kv.store(), &arguments.store)?;
    match wrong {
        None => from.get_ref().check_unchanged(),
        Some(why) => bail!(
            "{}: line {number} {why}; the lines before it were loaded",
            arguments.file.shown()
        ),
    }
}

/// Parses a line into key and value; returns the syntax error if it is invalid.
fn parse_pair(form: TextEncoding, line: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
    let tab = line.iter().position(|byte| *byte == b'\t');
    let tab = tab.ok_or("has no tab: key, tab, value")?;
    Ok((form.decode(&line[..tab])?, form.decode(&line[tab + 1..])?))
}

fn write_lines(kv: &Kv, arguments: &Arguments, batch: Batch, taken: u64) -> anyhow::Result<()> {
    match kv.write(batch) {
        Ok(_) => Ok(()),
        Err(refused) => {
            // Earlier batches are kept.
            close_store(kv.store(), &arguments.store)?;
            let file = arguments.file.shown();
            let kept = match taken {
                0 => format!("{file}: no line of it was loaded"),
                1 => format!("{file}: line 1 was loaded, no other"),
                _ => format!("{file}: lines 1 to {taken} were loaded, no other"),
            };
            match refused.1 {
                Error::Misuse(why) => Err(anyhow!("{kept}: {why}")),
                error => Err(with_context(&arguments.store, error).context(kept)),
            }
        }
    }
}
