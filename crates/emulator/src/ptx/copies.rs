//! Copies that are complete later, and their barriers.

use super::{
    Operand,
    meaning::{Modifiers, Space, number_of, pointer, value},
};

pub(super) fn mbarrier(operands: &[Operand], modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    let operand = |at: usize| operands.get(at).ok_or_else(|| format!("operand {at} is missing"));
    modifiers.kind()?;
    if modifiers.space() == Space::Cluster {
        return Err("the emulator knows barriers of the own block only".to_owned());
    }
    if modifiers.take("init") {
        return Ok(format!("emulator::barrier_init({}, {});", number_of(operand(0)?)?, value(operand(1)?)?));
    }
    if modifiers.take("arrive") {
        let bytes = if modifiers.take("expect_tx") { value(operand(2)?)? } else { "0".to_owned() };
        return match operand(0)? {
            Operand::Register(name) if name == "_" => {
                Ok(format!("emulator::barrier_expect({}, {bytes});", number_of(operand(1)?)?))
            }
            _ => Err("the emulator keeps no state of an arrival".to_owned()),
        };
    }
    if modifiers.take("try_wait") && modifiers.take("parity") {
        let (to, parity) = (value(operand(0)?)?, value(operand(2)?)?);
        return Ok(format!("{to} = emulator::barrier_try_wait({}, {parity});", number_of(operand(1)?)?));
    }
    Err("the emulator does not know this operation of a barrier".to_owned())
}

pub(super) fn copied(operands: &[Operand], modifiers: &mut Modifiers<'_>) -> Result<String, String> {
    let operand = |at: usize| operands.get(at).ok_or_else(|| format!("operand {at} is missing"));
    if !modifiers.take("async") {
        return Err("the emulator does not know this copy".to_owned());
    }
    let copies = if modifiers.take("bulk") { "bulk" } else { "small" };
    if modifiers.take("commit_group") {
        return Ok(format!("emulator::current->{copies}.end_group();"));
    }
    if modifiers.take("wait_all") {
        return Ok(format!("emulator::wait_copies(emulator::current->{copies}, 0, false, true);"));
    }
    if modifiers.take("wait_group") {
        let only_read = modifiers.take("read");
        return Ok(format!(
            "emulator::wait_copies(emulator::current->{copies}, {}, {only_read}, false);",
            value(operand(0)?)?
        ));
    }
    if copies == "small" {
        modifiers.skip(&["ca", "cg"]);
        let (to, from) =
            (modifiers.take("shared") || modifiers.take("shared::cta"), modifiers.take("global"));
        let bytes = value(operand(2)?)?;
        return match (to, from) {
            (true, true) => {
                let to = pointer(operand(0)?, Space::Shared)?;
                Ok(format!("emulator::small_load({to}, {}, {bytes});", pointer(operand(1)?, Space::Global)?))
            }
            _ => Err("the emulator copies from global to shared memory".to_owned()),
        };
    }
    // The first space is the target's.
    let spaces: Vec<&str> =
        modifiers.left.iter().copied().filter(|name| name.contains("shared") || *name == "global").collect();
    modifiers.left.retain(|name| !spaces.contains(name));
    let (first, second) = (operand(0)?, operand(1)?);
    let bytes = value(operand(2)?)?;
    match (&spaces[..], modifiers.take("mbarrier::complete_tx::bytes"), modifiers.take("bulk_group")) {
        (["shared::cluster" | "shared::cta", "global"], true, false) => Ok(format!(
            "emulator::bulk_load({}, {}, {bytes}, {});",
            number_of(first)?,
            pointer(second, Space::Global)?,
            number_of(operand(3)?)?
        )),
        (["global", "shared::cta"], false, true) => Ok(format!(
            "emulator::bulk_store({}, {}, {bytes});",
            pointer(first, Space::Global)?,
            number_of(second)?
        )),
        _ => Err("the emulator does not know this bulk copy".to_owned()),
    }
}
