//! The documents say what is: steps, commands, settings, errors and examples are compared with the code.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;

use dsh_policy::codec;
use dsh_policy::denial::{Operation, Rule};
use dsh_policy::error::ErrorCode;
use dsh_policy::mode::{Guarantee, SandboxMode};
use dsh_policy::plan::Step;
use dsh_tests::binaries::repository;
use dsh_tests::{World, users};

fn read(name: &str) -> String {
    fs::read_to_string(repository().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Every step in the order of its declaration, which is the order on the wire.
fn steps() -> Vec<Step> {
    (0..=u8::MAX)
        .map_while(|number| codec::from_binary::<Step>(&[number]).ok())
        .collect()
}

/// Numbered lines `N. \`name\`: …` of a section.
fn numbered(section: &str) -> Vec<(usize, String)> {
    section
        .lines()
        .filter_map(|line| {
            let (number, rest) = line.split_once(". `")?;
            Some((number.parse().ok()?, rest.split_once('`')?.0.to_owned()))
        })
        .collect()
}

#[test]
fn readme_has_the_steps_of_the_plan_in_their_order() {
    let readme = read("README.md");
    let section = readme
        .split("## How it works")
        .nth(1)
        .unwrap()
        .split("\n## ")
        .next()
        .unwrap();
    let expected: Vec<_> = steps()
        .iter()
        .enumerate()
        .map(|(index, step)| (index + 1, step.name().to_owned()))
        .collect();
    assert!(expected.len() > 10);
    assert_eq!(numbered(section), expected);
}

/// Comments such as `// 3. drop-capabilities: …` in the helper.
#[test]
fn the_helper_s_numbered_comments_are_the_steps() {
    let mut found = BTreeSet::new();
    let mut folders = vec![repository().join("helper/src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            for line in fs::read_to_string(&path).unwrap().lines() {
                let Some(comment) = line.trim_start().strip_prefix("//") else {
                    continue;
                };
                let comment = comment.trim_start_matches(['/', '!']).trim_start();
                let Some((number, rest)) = comment.split_once(". ") else {
                    continue;
                };
                let Ok(number) = number.parse::<usize>() else { continue };
                let name = rest.split([':', ' ', '.', ',']).next().unwrap();
                let step = steps().get(number.wrapping_sub(1)).copied();
                assert_eq!(step.map(Step::name), Some(name), "{}: {line}", path.display());
                found.insert(number);
            }
        }
    }
    assert!(
        found.is_superset(&(1..=5).collect()),
        "the steps before the fork are numbered comments in main.rs: {found:?}"
    );
}

/// The child's steps, whose position is what travels when one fails, are in the order of the plan.
#[test]
fn the_child_s_steps_are_in_the_order_of_the_plan() {
    let source = read("helper/src/sys/child.rs");
    let list = source.split("STEPS").nth(1).unwrap().split("];").next().unwrap();
    let named: Vec<&str> = list
        .split("Step::")
        .skip(1)
        .map(|rest| rest.split([',', '\n', ']']).next().unwrap())
        .collect();
    let order: Vec<String> = steps().iter().map(|step| format!("{step:?}")).collect();
    let positions: Vec<usize> = named
        .iter()
        .map(|name| order.iter().position(|known| known == name).unwrap())
        .collect();
    assert!(positions.len() >= 7 && positions.is_sorted(), "{named:?}");
}

#[test]
fn the_table_of_errors_is_the_code_s() {
    let facts = read("docs/facts.md");
    let row = |name: &str| {
        facts
            .lines()
            .find(|line| line.starts_with(&format!("| `{name}` | `")))
            .map(str::to_owned)
    };
    for operation in Operation::ALL {
        let row = row(operation.as_str()).unwrap_or_else(|| panic!("docs/facts.md has no row for {operation}"));
        assert!(
            row.starts_with(&format!("| `{operation}` | `{}` |", operation.errno())),
            "{row}"
        );
    }
    for rule in Rule::ALL {
        assert!(
            facts.contains(&format!("| `{rule}` |")),
            "docs/facts.md does not explain the rule {rule}"
        );
    }
}

#[test]
fn every_setting_is_documented_with_its_default_and_no_other() {
    let world = World::new(users()[0]);
    let output = world
        .dsh_exec(&["config", "show", "--socket"].map(OsStr::new))
        .arg(world.socket())
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let settings: Vec<(&str, &str)> = shown
        .lines()
        .filter_map(|line| line.trim_start_matches("# ").split_once(" = "))
        .filter(|(key, _)| key.chars().all(|c| c.is_ascii_alphanumeric()))
        .collect();
    assert!(settings.len() > 25, "{shown}");
    let document = read("docs/configuration.md");
    let keys = document.split("## Examples").next().unwrap();
    let documented: BTreeSet<&str> = keys
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(key, _)| key)
        .collect();
    let known: BTreeSet<&str> = settings.iter().map(|(key, _)| *key).collect();
    assert_eq!(documented, known);
    for (key, value) in settings {
        // A commented line is an example for a key without a default.
        let has_default = shown.lines().any(|line| line.starts_with(&format!("{key} = ")));
        let cell = if has_default {
            format!("| `{key}` | `{value}` |")
        } else {
            format!("| `{key}` | none |")
        };
        assert!(
            document.contains(&cell),
            "docs/configuration.md should have the row {cell}"
        );
    }
    for guarantee in Guarantee::ALL {
        assert!(document.contains(&format!("`{guarantee}`")), "{guarantee}");
    }
}

/// Indented or fenced TOML of the document, through the daemon's own check.
#[test]
fn every_example_configuration_is_accepted() {
    let document = read("docs/configuration.md");
    let examples: Vec<&str> = document
        .split("```toml\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect();
    assert!(examples.len() >= 2);
    for example in examples {
        let world = World::without_daemon(users()[0], example);
        let output = world
            .command(world.binary("dsh-execd"))
            .arg("--check-config")
            .output()
            .unwrap();
        assert!(output.status.success(), "{example}: {output:?}");
    }
}

/// Every `dsh-exec …` line of the documents parses: its subcommand and each of its options are in the command's help.
#[test]
fn commands_of_the_documents_exist() {
    let world = World::without_daemon(users()[0], "");
    let help = |arguments: &[&str]| {
        let output = world.dsh_exec(&[]).args(arguments).arg("--help").output().unwrap();
        assert!(output.status.success(), "{arguments:?} is no command");
        String::from_utf8(output.stdout).unwrap()
    };
    let mut seen = 0;
    for name in [
        "README.md",
        "docs/configuration.md",
        "docs/protocol.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
    ] {
        for line in read(name).lines().filter_map(|line| line.strip_prefix("    ")) {
            let Some(rest) = line
                .strip_prefix("dsh-exec ")
                .or_else(|| line.strip_prefix("./dsh-exec "))
            else {
                continue;
            };
            let words: Vec<&str> = rest
                .split('\'')
                .next()
                .unwrap()
                .split('#')
                .next()
                .unwrap()
                .split_whitespace()
                .collect();
            let mut command: Vec<&str> = vec![words[0]];
            if ["config", "service"].contains(&words[0]) {
                command.push(words[1]);
            }
            let text = help(&command);
            for option in words.iter().filter(|word| word.starts_with("--") && word.len() > 2) {
                assert!(text.contains(option), "{name}: {line}: {command:?} has no {option}");
                seen += 1;
            }
        }
    }
    assert!(seen >= 4);
}

#[test]
fn the_scripts_of_the_readme_are_there_and_executable() {
    use std::os::unix::fs::PermissionsExt;
    let readme = read("README.md");
    for script in ["dsh-exec", "test"] {
        assert!(readme.contains(&format!("    ./{script}")));
        let mode = fs::metadata(repository().join(script)).unwrap().permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{script}");
    }
    for link in readme.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
        assert!(
            repository().join(link).exists(),
            "README links to {link}, which does not exist"
        );
    }
}

#[test]
fn the_protocol_document_names_every_mode_and_error() {
    let document = read("docs/protocol.md");
    for code in ErrorCode::ALL {
        assert!(document.contains(&format!("`{code}`")), "{code}");
    }
    for mode in SandboxMode::ALL {
        assert!(document.contains(mode.as_str()), "{mode}");
    }
}

/// The JSON of each frame in the protocol's transcript is one that the types accept.
#[test]
fn the_transcript_of_the_protocol_decodes() {
    use dsh_policy::wire::{ClientMessage, Encoding, Hello, HelloReply, ServerMessage};
    let document = read("docs/protocol.md");
    let (mut sent, mut received) = (0, 0);
    for line in document.lines() {
        if let Some(json) = line.strip_prefix("> ") {
            if sent == 0 {
                serde_json::from_str::<Hello>(json).unwrap_or_else(|error| panic!("{error}: {json}"));
            } else {
                let message = Encoding::Json
                    .client_message(json.as_bytes())
                    .unwrap_or_else(|error| panic!("{error}: {json}"));
                assert_ne!(message, ClientMessage::Unknown, "{json}");
            }
            sent += 1;
        } else if let Some(json) = line.strip_prefix("< ") {
            if received == 0 {
                serde_json::from_str::<HelloReply>(json).unwrap_or_else(|error| panic!("{error}: {json}"));
            } else {
                let message = Encoding::Json
                    .server_message(json.as_bytes())
                    .unwrap_or_else(|error| panic!("{error}: {json}"));
                assert_ne!(message, ServerMessage::Unknown, "{json}");
            }
            received += 1;
        }
    }
    assert!(sent >= 3 && received >= 4);
}
