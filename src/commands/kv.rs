//! `draconis kv`: keys and values in a store.

use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Bound;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use draconis_objects::Error;
use draconis_objects::kv::{Batch, Kv};
use serde::Serialize;

use super::store::{readable, source, tell, writable};
use crate::cli::{KvCommand, KvDel, KvGet, KvLoad, KvPut, KvScan, KvStats};
use crate::progress::Progress;
use crate::text::{self, Output, printable};

/// Lines that come in together, in bytes.
const LOT_BYTES: usize = 1 << 20;

pub fn run(command: &KvCommand) -> anyhow::Result<ExitCode> {
    match command {
        KvCommand::Put(arguments) => put(arguments)?,
        KvCommand::Get(arguments) => get(arguments)?,
        KvCommand::Del(arguments) => del(arguments)?,
        KvCommand::Scan(arguments) => scan(arguments)?,
        KvCommand::Stats(arguments) => stats(arguments)?,
        KvCommand::Load(arguments) => load(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes all changes of a batch; they need not be durable yet.
fn write(kv: &Kv, store: &Path, batch: Batch) -> anyhow::Result<()> {
    match kv.write(batch) {
        Ok(_) => Ok(()),
        Err(refused) => Err(tell(store, refused.1)),
    }
}

fn sync(kv: &Kv, store: &Path) -> anyhow::Result<()> {
    kv.store().sync().map_err(|error| tell(store, error))
}

fn put(arguments: &KvPut) -> anyhow::Result<()> {
    let value = match &arguments.value {
        Some(value) => value.as_bytes().to_vec(),
        None => {
            let mut value = vec![];
            std::io::stdin().lock().read_to_end(&mut value)?;
            value
        }
    };
    let kv = Kv::new(writable(&arguments.store)?);
    let mut batch = Batch::new();
    batch.put(arguments.key.as_bytes(), &value);
    write(&kv, &arguments.store, batch)?;
    sync(&kv, &arguments.store)
}

fn get(arguments: &KvGet) -> anyhow::Result<()> {
    let kv = Kv::new(readable(&arguments.store)?);
    let key = arguments.key.as_bytes();
    match kv.get(key).map_err(|error| tell(&arguments.store, error))? {
        Some(value) => {
            let mut out = std::io::stdout().lock();
            out.write_all(&value)?;
            out.flush()?;
            Ok(())
        }
        None => bail!("{}: there is no key {}", arguments.store.display(), printable(key)),
    }
}

fn del(arguments: &KvDel) -> anyhow::Result<()> {
    let kv = Kv::new(writable(&arguments.store)?);
    let mut batch = Batch::new();
    arguments.keys.iter().for_each(|key| batch.delete(key.as_bytes()));
    write(&kv, &arguments.store, batch)?;
    sync(&kv, &arguments.store)
}

/// The first key behind all that begin with `prefix`, if there is one.
fn behind(prefix: &[u8]) -> Bound<Vec<u8>> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return Bound::Excluded(end);
        }
    }
    Bound::Unbounded
}

fn scan(arguments: &KvScan) -> anyhow::Result<()> {
    let kv = Kv::new(readable(&arguments.store)?);
    let bytes = |text: &std::ffi::OsString| text.clone().into_vec();
    let (from, to) = match &arguments.prefix {
        Some(prefix) => (Bound::Included(bytes(prefix)), behind(prefix.as_bytes())),
        None => (
            arguments.from.as_ref().map_or(Bound::Unbounded, |key| Bound::Included(bytes(key))),
            arguments.to.as_ref().map_or(Bound::Unbounded, |key| Bound::Excluded(bytes(key))),
        ),
    };
    let range = (from.as_ref().map(Vec::as_slice), to.as_ref().map(Vec::as_slice));
    let mut pairs = kv.scan::<(Bound<&[u8]>, Bound<&[u8]>)>(&range);
    let mut out = Output::new();
    for _ in 0..arguments.limit.unwrap_or(usize::MAX) {
        let next = if arguments.reverse { pairs.next_back() } else { pairs.next() };
        let Some(pair) = next else { break };
        let (key, value) = pair.map_err(|error| tell(&arguments.store, error))?;
        out.name(&key)?;
        if !arguments.keys {
            out.write_all(b"\t")?;
            out.name(&value)?;
        }
        out.write_all(b"\n")?;
    }
    out.flush()?;
    Ok(())
}

#[derive(Serialize)]
struct Facts {
    keys: u64,
    key_bytes: u64,
    value_bytes: u64,
    long_values: u64,
    used_bytes: u64,
    capacity_bytes: u64,
    pending_keys: u64,
}

fn stats(arguments: &KvStats) -> anyhow::Result<()> {
    let kv = Kv::new(readable(&arguments.store)?);
    let count = kv.count().map_err(|error| tell(&arguments.store, error))?;
    let info = kv.store().info();
    if arguments.json {
        let facts = Facts {
            keys: count.keys,
            key_bytes: count.key_bytes,
            value_bytes: count.value_bytes,
            long_values: count.long_values,
            used_bytes: info.used_bytes,
            capacity_bytes: info.capacity_bytes,
            pending_keys: info.pending_keys,
        };
        println!("{}", serde_json::to_string_pretty(&facts)?);
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "keys          {}", count.keys)?;
    writeln!(out, "their bytes   {}", text::bytes(count.key_bytes))?;
    writeln!(out, "values        {}", text::bytes(count.value_bytes))?;
    writeln!(out, "long values   {}", count.long_values)?;
    writeln!(out, "not in tree   {} changes", info.pending_keys)?;
    let (used, capacity) = (text::bytes(info.used_bytes), text::bytes(info.capacity_bytes));
    writeln!(out, "store         {used} of {capacity}")?;
    Ok(())
}

fn load(arguments: &KvLoad) -> anyhow::Result<()> {
    let (from, len) = source(Some(&arguments.file))?;
    let kv = Kv::new(writable(&arguments.store)?);
    let mut from = BufReader::with_capacity(LOT_BYTES, from);
    let mut progress = Progress::new(arguments.progress, len);
    let (mut line, mut number, mut batch) = (vec![], 0u64, Batch::new());
    // What came before a line that makes no sense is kept, and the line is named.
    let wrong = loop {
        line.clear();
        let got = from.read_until(b'\n', &mut line)?;
        if got == 0 {
            break None;
        }
        number += 1;
        progress.add(got as u64);
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        let Some(tab) = text.iter().position(|byte| *byte == b'\t') else { break Some(number) };
        batch.put(&text[..tab], &text[tab + 1..]);
        if batch.len_bytes() >= LOT_BYTES {
            write_lines(&kv, arguments, std::mem::take(&mut batch), number)?;
        }
    };
    write_lines(&kv, arguments, batch, number)?;
    sync(&kv, &arguments.store)?;
    match wrong {
        None => Ok(()),
        Some(number) => bail!(
            "{}: line {number} has no tab: key, tab, value; the lines before it were loaded",
            arguments.file.display()
        ),
    }
}

fn write_lines(kv: &Kv, arguments: &KvLoad, batch: Batch, number: u64) -> anyhow::Result<()> {
    match kv.write(batch) {
        Ok(_) => Ok(()),
        Err(refused) => {
            // What was taken before is kept.
            sync(kv, &arguments.store)?;
            let place = format!("{}, up to line {number}", arguments.file.display());
            match refused.1 {
                Error::Misuse(why) => Err(anyhow!("{place}: {why}")),
                error => Err(tell(&arguments.store, error).context(place)),
            }
        }
    }
}
