//! The world of a launcher around a command that starts ranks itself where there is none.

use std::env;

use super::LaunchError;

/// The place that a launcher around this process has given it: `antiphon run`, or torchrun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// Which rank this process is: RANK.
    pub rank: usize,
    /// How many ranks there are: WORLD_SIZE.
    pub size: usize,
    /// How many of them are on this machine: LOCAL_WORLD_SIZE, or all where it is not set.
    pub local_size: usize,
}

impl World {
    /// The world around this process, which has as many ranks as were `asked` for; `None` where RANK or WORLD_SIZE is not set.
    ///
    /// # Errors
    /// [`LaunchError::Variable`] for a variable that is no such number, [`LaunchError::OtherWorld`] for a world of another size.
    pub fn around(asked: Option<usize>) -> Result<Option<Self>, LaunchError> {
        Self::read(asked, |name| env::var(name).ok())
    }

    fn read(
        asked: Option<usize>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, LaunchError> {
        let number = |name: &'static str| match variable(name).filter(|value| !value.is_empty()) {
            None => Ok(None),
            Some(value) => value.parse().map(Some).map_err(|_| LaunchError::Variable { name, value }),
        };
        let (Some(rank), Some(size)) = (number("RANK")?, number("WORLD_SIZE")?) else { return Ok(None) };
        let local_size = number("LOCAL_WORLD_SIZE")?.unwrap_or(size);
        let beyond = |name, value: usize| LaunchError::Variable { name, value: value.to_string() };
        if rank >= size {
            return Err(beyond("RANK", rank));
        }
        if local_size == 0 || local_size > size {
            return Err(beyond("LOCAL_WORLD_SIZE", local_size));
        }
        match asked {
            Some(asked) if asked != size => Err(LaunchError::OtherWorld { asked, size }),
            _ => Ok(Some(Self { rank, size, local_size })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(asked: Option<usize>, variables: &[(&str, &str)]) -> Result<Option<World>, String> {
        let variable =
            |name: &str| variables.iter().find(|(one, _)| *one == name).map(|(_, value)| (*value).to_owned());
        World::read(asked, variable).map_err(|error| error.to_string())
    }

    #[test]
    fn it_is_what_the_launcher_says() {
        let of_two_machines = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")];
        assert_eq!(read(Some(8), &of_two_machines), Ok(Some(World { rank: 5, size: 8, local_size: 4 })));
        let of_one = [("RANK", "0"), ("WORLD_SIZE", "2")];
        assert_eq!(read(None, &of_one), Ok(Some(World { rank: 0, size: 2, local_size: 2 })));
    }

    #[test]
    fn without_a_launcher_there_is_none() {
        assert_eq!(read(Some(4), &[]), Ok(None));
        assert_eq!(read(None, &[("RANK", ""), ("WORLD_SIZE", "2")]), Ok(None));
        assert_eq!(read(None, &[("WORLD_SIZE", "2")]), Ok(None));
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (variables, name) in [
            ([("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")], "RANK"),
            ([("RANK", "-1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")], "RANK"),
            ([("RANK", "0"), ("WORLD_SIZE", "two"), ("LOCAL_WORLD_SIZE", "2")], "WORLD_SIZE"),
            ([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "3")], "LOCAL_WORLD_SIZE"),
            ([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "0")], "LOCAL_WORLD_SIZE"),
        ] {
            let said = read(None, &variables).unwrap_err();
            assert!(said.starts_with(&format!("{name}=")), "{said}");
        }
        let said = read(Some(3), &[("RANK", "0"), ("WORLD_SIZE", "2")]).unwrap_err();
        assert!(said.contains('3') && said.contains('2'), "{said}");
    }
}
