//! The JSON Schema of the wire in `docs/` is the one of the types. `DSH_WRITE_SCHEMA=1 cargo test -p dsh-tests --test schema` writes it anew.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use dsh_policy::wire::{ClientMessage, Hello, HelloReply, ServerMessage};
use dsh_tests::binaries;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

/// One document with the four kinds of frames and everything that they are made of.
fn schema() -> Value {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let frames = [
        ("Hello", generator.subschema_for::<Hello>()),
        ("HelloReply", generator.subschema_for::<HelloReply>()),
        ("ClientMessage", generator.subschema_for::<ClientMessage>()),
        ("ServerMessage", generator.subschema_for::<ServerMessage>()),
    ];
    let references: Vec<Value> = frames.iter().map(|(_, schema)| schema.clone().to_value()).collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Frames of dsh-execd",
        "description": "The first frame of each side is a Hello and a HelloReply; after that clients send a ClientMessage in each frame and the daemon a ServerMessage. Fields and kinds that are not here may come from a newer version and are ignored.",
        "oneOf": references,
        "$defs": generator.take_definitions(true),
    })
}

#[test]
fn the_schema_in_the_documents_is_that_of_the_types() {
    let file = binaries::repository().join("docs/protocol.schema.json");
    let mut text = serde_json::to_string_pretty(&schema()).unwrap();
    text.push('\n');
    if std::env::var_os("DSH_WRITE_SCHEMA").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    let written = std::fs::read_to_string(&file).expect("docs/protocol.schema.json");
    assert!(
        written == text,
        "docs/protocol.schema.json has drifted; DSH_WRITE_SCHEMA=1 writes it anew"
    );
}

#[test]
fn every_frame_has_a_schema_with_its_fields() {
    let schema = schema();
    for (name, kinds) in [
        (
            "ClientMessage",
            &["run", "stdin", "cancel", "start", "taskRead", "notices"][..],
        ),
        (
            "ServerMessage",
            &["started", "output", "denial", "finished", "error", "taskOutput"],
        ),
    ] {
        let text = schema["$defs"][name].to_string();
        for kind in kinds {
            assert!(text.contains(&format!("\"const\":\"{kind}\"")), "{name} {kind}");
        }
    }
    assert!(schema["$defs"]["BashExecRequest"]["properties"]["timeoutMs"].is_object());
    assert_eq!(schema["$defs"]["BashExecRequest"]["required"], json!(["command"]));
}
