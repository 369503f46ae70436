//! Device tables of genext2fs and makedevs, which add nodes to a tree.
//!
//! ```text
//!   # NAME      TYPE  MODE  UID  GID  MAJOR  MINOR  START  INC  COUNT
//!   /dev        d     755   0    0    -      -      -      -    -
//!   /dev/tty    c     666   0    0    4      0      0      1    10       tty0 to tty9
//!   /bin/su     f     4755  0    0    -      -      -      -    -        must be there
//! ```

use anyhow::{Context, bail, ensure};
use draconis_ext::mkfs::{NodeId, NodeKind, Tree, TreeNode};

use super::merge::split_path;
use super::{PopulateSource, TimestampPolicy};
use crate::messages::escape_control_chars;

/// Maximum number of nodes per line.
const MAX_NODES: u64 = 65_536;

/// A parsed table: lines with their numbers.
#[derive(Debug, Default)]
pub struct DeviceTable(Vec<(usize, DeviceTableLine)>);

#[derive(Debug)]
struct DeviceTableLine {
    path: Vec<u8>,
    kind: u8,
    mode: u16,
    uid: u32,
    gid: u32,
    device: (u32, u32),
    start: u64,
    step: u32,
    count: u64,
}

impl DeviceTable {
    /// Parses a table.
    pub fn parse(text: &[u8]) -> anyhow::Result<Self> {
        let lines = text.split(|byte| *byte == b'\n').zip(1..);
        let mut table = vec![];
        for (line, nth) in lines {
            let fields: Vec<&[u8]> =
                line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty()).collect();
            if fields.first().is_some_and(|first| !first.starts_with(b"#")) {
                let line = parse(&fields).with_context(|| format!("line {nth}"))?;
                table.push((nth, line));
            }
        }
        Ok(Self(table))
    }
}

fn parse(fields: &[&[u8]]) -> anyhow::Result<DeviceTableLine> {
    let &[path, kind, ref rest @ ..] = fields else { bail!("a name and a type are needed") };
    let text = |nth: usize| -> anyhow::Result<&str> {
        Ok(std::str::from_utf8(rest.get(nth).copied().unwrap_or(b"-"))?)
    };
    let number = |nth: usize, what: &str| -> anyhow::Result<u32> {
        match text(nth)? {
            "-" => Ok(0),
            text => text.parse().with_context(|| format!("{what} {text}")),
        }
    };
    let mode = text(0)?;
    let mode = u16::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o7777);
    let [kind] = *kind else {
        bail!("the type {}: one letter is needed", escape_control_chars(kind))
    };
    ensure!(b"fdcbpsr".contains(&kind), "the type {}: f, d, c, b, p, s or r", char::from(kind));
    let count = u64::from(number(7, "the count")?);
    ensure!(count <= MAX_NODES, "the count {count}: {MAX_NODES} at most");
    Ok(DeviceTableLine {
        path: path.to_vec(),
        kind,
        mode: mode.context("a mode of octal digits is needed")?,
        uid: number(1, "the user")?,
        gid: number(2, "the group")?,
        device: (number(3, "the major number")?, number(4, "the minor number")?),
        start: number(5, "the start")?.into(),
        step: number(6, "the increment")?,
        count,
    })
}

/// Applies a table to a tree.
pub fn apply_table(
    source: &mut PopulateSource<'_>,
    table: &DeviceTable,
    stamp: TimestampPolicy,
) -> anyhow::Result<()> {
    for (nth, line) in &table.0 {
        apply_line(source, line, stamp)
            .with_context(|| format!("line {nth}: {}", escape_control_chars(&line.path)))?;
    }
    Ok(())
}

fn apply_line(
    source: &mut PopulateSource<'_>,
    line: &DeviceTableLine,
    stamp: TimestampPolicy,
) -> anyhow::Result<()> {
    if matches!(line.kind, b'f' | b'r') {
        return change_existing_nodes(source, line);
    }
    if line.count == 0 {
        return make_device_node(source, line, &line.path, line.device.1, stamp);
    }
    for nth in 0..line.count {
        let name = [&line.path[..], (line.start + nth).to_string().as_bytes()].concat();
        let minor = u64::from(line.device.1) + nth * u64::from(line.step);
        make_device_node(
            source,
            line,
            &name,
            u32::try_from(minor).context("a minor number beyond 32 bits")?,
            stamp,
        )?;
    }
    Ok(())
}

/// Changes mode and owner of an existing node; for `r`, of all nodes below it too.
fn change_existing_nodes(
    source: &mut PopulateSource<'_>,
    line: &DeviceTableLine,
) -> anyhow::Result<()> {
    let found = find_node(&source.tree, &split_path(&line.path)?);
    let found = found.context("not there; only d, c, b, p and s make something")?;
    let mut todo = vec![found];
    while let Some(id) = todo.pop() {
        if line.kind == b'r' {
            todo.extend(source.tree.names(id).map(|(_, id)| id));
        }
        if let Some(node) = source.tree.node_mut(id) {
            set_mode_and_owner(node, line);
        }
        source.implied_dirs.remove(&id);
    }
    Ok(())
}

fn set_mode_and_owner(node: &mut TreeNode, line: &DeviceTableLine) {
    if !matches!(node.kind_data, NodeKind::Symlink(_)) {
        node.mode = line.mode;
    }
    (node.uid, node.gid) = (line.uid, line.gid);
}

fn find_node(tree: &Tree, parts: &[&[u8]]) -> Option<NodeId> {
    parts.iter().try_fold(NodeId::ROOT, |dir, name| tree.lookup(dir, name))
}

fn make_device_node(
    source: &mut PopulateSource<'_>,
    line: &DeviceTableLine,
    path: &[u8],
    minor: u32,
    stamp: TimestampPolicy,
) -> anyhow::Result<()> {
    let what = match line.kind {
        b'd' => NodeKind::Directory,
        b'c' => NodeKind::CharDevice(line.device.0, minor),
        b'b' => NodeKind::BlockDevice(line.device.0, minor),
        b'p' => NodeKind::Fifo,
        _ => NodeKind::Socket,
    };
    let parts = split_path(path)?;
    if matches!(what, NodeKind::Directory)
        && let Some(there) = find_node(&source.tree, &parts)
        && let Some(node) = source.tree.node_mut(there)
        && matches!(node.kind_data, NodeKind::Directory)
    {
        set_mode_and_owner(node, line);
        source.implied_dirs.remove(&there);
        return Ok(());
    }
    let (last, above) = parts.split_last().context("the root directory is something else")?;
    let dir = find_node(&source.tree, above)
        .context("its directory is not there; a line of type d makes it")?;
    let mut node = TreeNode::new(what, line.mode);
    stamp.set_times(&mut node, stamp.now, None, None);
    set_mode_and_owner(&mut node, line);
    source.tree.add(dir, last, node)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NoContents;

    impl draconis_ext::mkfs::FileSource for NoContents {
        fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Err(std::io::ErrorKind::NotFound.into())
        }
    }

    fn tree_from_table(table: &str) -> anyhow::Result<Tree> {
        let table = DeviceTable::parse(table.as_bytes())?;
        let mut source =
            PopulateSource::new(Tree::new(TreeNode::new(NodeKind::Directory, 0o755)), NoContents);
        let stamp = TimestampPolicy { now: Default::default(), reproducible: false };
        apply_table(&mut source, &table, stamp)?;
        Ok(source.tree)
    }

    #[test]
    fn table_lines_create_nodes() {
        let tree = tree_from_table(
            "# comment\n\n/dev d 755 0 0 - - - - -\n/dev/tty c 666 1 5 4 0 0 1 10\n\
             /dev/hda b 640 0 6 3 1 1 1 15\n/dev/log s 600 0 0\n/dev r 700 7 8\n",
        )
        .unwrap();
        let dev = tree.lookup(NodeId::ROOT, b"dev").unwrap();
        assert_eq!(tree.names(dev).count(), 26);
        let node = |name: &str| tree.node(tree.lookup(dev, name.as_bytes()).unwrap());
        assert!(matches!(node("tty9").kind_data, NodeKind::CharDevice(4, 9)));
        assert!(matches!(node("hda15").kind_data, NodeKind::BlockDevice(3, 15)));
        assert_eq!((node("hda1").mode, node("log").uid, node("log").gid), (0o700, 7, 8));
    }

    #[test]
    fn invalid_lines_are_refused_with_line_number() {
        for (table, said) in [
            ("/x", "line 1"),
            ("\n/x q 644 0 0", "line 2"),
            ("/x c 9 0 0 1 1", "octal"),
            ("/x c 644 0 0 1 1 0 1 99999", "count"),
            ("/x f 644 0 0", "not there"),
            ("/a/x c 644 0 0 1 1", "type d"),
            ("/../x c 644 0 0 1 1", "leads out"),
            ("/ c 644 0 0 1 1", "root directory"),
        ] {
            let error = format!("{:#}", tree_from_table(table).unwrap_err());
            assert!(error.contains(said), "{table}: {error}");
        }
    }
}
