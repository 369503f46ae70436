//! A tree served over channels between threads.

mod common;

use common::{Memory, PATIENCE, name, soon};
use draconis_exchange::{
    channel::{self, Caller},
    contract::{
        Node, Refusal,
        directory::{self, Directory, Records},
        file, tree,
    },
    heap::Block,
};

fn with_tree(test: impl FnOnce(&mut Caller<Directory>)) {
    let (client, server) = channel::pair::<Directory>();
    let hand = std::thread::spawn(move || tree::serve(server, &Memory, PATIENCE));
    let mut caller = Caller::new(client, PATIENCE);
    test(&mut caller);
    drop(caller);
    assert_eq!(hand.join().unwrap(), Ok(()));
}

#[test]
fn a_bound_file_is_read() {
    with_tree(|directory| {
        let (mut hello, attributes) =
            tree::open(directory, Node::ROOT, b"hello", PATIENCE).unwrap();
        assert_eq!(attributes.size_bytes, 12);
        let buffer = Block::private(4096);
        let ack = hello
            .call(file::Read { buffer, buffer_offset: 100, offset: 7, len: 1000 })
            .unwrap()
            .unwrap();
        assert_eq!(ack.len, 5);
        assert_eq!(&ack.buffer.bytes().unwrap()[100..105], b"tree!");
        let nak = hello
            .call(file::Write { buffer: ack.buffer, buffer_offset: 0, offset: 0, len: 1 })
            .unwrap()
            .unwrap_err();
        assert_eq!((nak.why, nak.buffer.len()), (Refusal::NotSupported, 4096));
    });
}

#[test]
fn links_are_reparsed_by_the_client_up_to_a_bound() {
    with_tree(|directory| {
        let mut open = |path: &[u8]| {
            tree::open(directory, Node::ROOT, path, PATIENCE).map(|(_, attributes)| attributes.node)
        };
        assert_eq!(open(b"/dir/../link"), Ok(Node(2)));
        assert_eq!(open(b"dir/loop"), Ok(Node(2)));
        assert_eq!(open(b"self"), Err(Refusal::TooManyLinks));
        assert_eq!(open(b"self/hello"), Err(Refusal::TooManyLinks));
        assert_eq!(open(b"hello/"), Err(Refusal::NotADirectory));
        assert_eq!(open(b"hello/x"), Err(Refusal::NotADirectory));
        assert_eq!(open(b"dir"), Err(Refusal::IsADirectory));
        assert_eq!(open(b"nothing"), Err(Refusal::NotFound));
    });
}

#[test]
fn a_bound_directory_answers_and_lists() {
    with_tree(|root| {
        let (client, server) = channel::pair::<Directory>();
        let room = Block::private(tree::PATH_MAX_BYTES);
        let end = directory::End::Directory(server);
        let (attributes, _) = tree::bind(root, Node::ROOT, b"dir", room, end).unwrap();
        let (reply, client) = client
            .call(directory::Lookup { parent: attributes.node, name: name("loop") }, soon())
            .unwrap();
        assert_eq!(reply.unwrap().attributes.node, Node(5));
        let message = directory::Enumerate {
            node: Node::ROOT,
            cookie: 0,
            buffer: Block::private(4096),
            with_attributes: true,
        };
        let (reply, _) = client.call(message, soon()).unwrap();
        let ack = reply.unwrap();
        let names: Vec<_> = Records::new(&ack.buffer, ack.len)
            .unwrap()
            .map(|entry| String::from_utf8(entry.unwrap().name.as_bytes().to_vec()).unwrap())
            .collect();
        assert_eq!(names, ["hello", "dir", "link", "self"]);
    });
}
