//! The box of ranks from which all groups are cut.

use crate::error::TopologyError;

/// The ranks `0..size` arranged as a box of `AXES` axes, of which axis 0 varies fastest.
///
/// The rank at coordinates `c` is `c[0] + sizes[0] * (c[1] + sizes[1] * (c[2] + ...))`.
///
/// ```
/// use antiphon_topology::Mesh;
///
/// let mesh = Mesh::new([2, 3])?;
/// assert_eq!(mesh.size(), 6);
/// assert_eq!(mesh.coordinates(5), [1, 2]);
/// assert_eq!(mesh.rank([1, 2]), 5);
/// # Ok::<(), antiphon_topology::TopologyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh<const AXES: usize> {
    sizes: [usize; AXES],
}

impl<const AXES: usize> Mesh<AXES> {
    /// A mesh with these numbers of ranks along its axes, fastest axis first.
    ///
    /// # Errors
    ///
    /// [`TopologyError::EmptyAxis`] if a size is 0, [`TopologyError::MeshTooLarge`] if their product
    /// overflows.
    pub fn new(sizes: [usize; AXES]) -> Result<Self, TopologyError> {
        if let Some(axis) = sizes.iter().position(|&size| size == 0) {
            return Err(TopologyError::EmptyAxis { axis, sizes: sizes.to_vec() });
        }
        match sizes.iter().try_fold(1usize, |ranks, &size| ranks.checked_mul(size)) {
            Some(_) => Ok(Self { sizes }),
            None => Err(TopologyError::MeshTooLarge { sizes: sizes.to_vec() }),
        }
    }

    /// A mesh whose sizes the caller has checked: none is 0 and their product fits.
    pub(crate) const fn trusted(sizes: [usize; AXES]) -> Self {
        Self { sizes }
    }

    /// The number of ranks along each axis, fastest axis first.
    pub const fn sizes(&self) -> [usize; AXES] {
        self.sizes
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The coordinates of a rank, fastest axis first. A rank at or above [`size`](Self::size) wraps around.
    pub fn coordinates(&self, mut rank: usize) -> [usize; AXES] {
        self.sizes.map(|size| {
            let coordinate = rank % size;
            rank /= size;
            coordinate
        })
    }

    /// The rank at these coordinates, fastest axis first. A coordinate at or above its axis' size wraps
    /// around.
    pub fn rank(&self, coordinates: [usize; AXES]) -> usize {
        let axes = self.sizes.iter().zip(coordinates);
        axes.rev().fold(0, |rank, (&size, coordinate)| rank * size + coordinate % size)
    }

    /// Cuts the mesh into groups that run along the chosen axes.
    pub const fn partition(self, along: [bool; AXES]) -> Partition<AXES> {
        Partition { mesh: self, along }
    }

    /// The coordinates of `rank` on the chosen axes, read as one number.
    fn pack(&self, rank: usize, chosen: [bool; AXES]) -> usize {
        let axes = self.sizes.iter().zip(self.coordinates(rank)).zip(chosen);
        axes.rev().filter(|&(_, chosen)| chosen).fold(0, |packed, ((&size, c), _)| packed * size + c)
    }

    /// The inverse of [`pack`](Self::pack): the rank that has these coordinates and 0 on all other axes.
    fn unpack(&self, mut packed: usize, chosen: [bool; AXES]) -> usize {
        let mut coordinates = [0; AXES];
        for axis in (0..AXES).filter(|&axis| chosen[axis]) {
            coordinates[axis] = packed % self.sizes[axis];
            packed /= self.sizes[axis];
        }
        self.rank(coordinates)
    }
}

/// A [`Mesh`] cut into groups of equal size: each rank is in exactly one.
///
/// The ranks of a group agree on all axes that were not chosen. Groups, and the ranks inside a group, are
/// numbered in ascending order of rank.
///
/// ```
/// use antiphon_topology::Mesh;
///
/// // Two nodes of four ranks; on each node pairs share tensors, and the two nodes share them as well.
/// let groups = Mesh::new([2, 2, 2])?.partition([true, false, true]);
/// assert_eq!(groups.to_vecs(), [[0, 1, 4, 5], [2, 3, 6, 7]]);
/// assert_eq!((groups.index_of(6), groups.position_of(6)), (1, 2));
/// assert_eq!(groups.rank(1, 2), 6);
/// # Ok::<(), antiphon_topology::TopologyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Partition<const AXES: usize> {
    mesh: Mesh<AXES>,
    along: [bool; AXES],
}

impl<const AXES: usize> Partition<AXES> {
    /// The number of ranks of one group.
    pub fn size(&self) -> usize {
        self.volume(true)
    }

    /// The number of groups.
    pub fn count(&self) -> usize {
        self.volume(false)
    }

    /// The group of the rank: `0..count`.
    pub fn index_of(&self, rank: usize) -> usize {
        self.mesh.pack(rank, self.across())
    }

    /// The rank's index in its group: `0..size`.
    pub fn position_of(&self, rank: usize) -> usize {
        self.mesh.pack(rank, self.along)
    }

    /// The rank at a position of a group, both wrapping around.
    pub fn rank(&self, index: usize, position: usize) -> usize {
        self.mesh.unpack(index, self.across()) + self.mesh.unpack(position, self.along)
    }

    /// The ranks of one group, ascending.
    pub fn group(&self, index: usize) -> impl ExactSizeIterator<Item = usize> + Clone + use<AXES> {
        let groups = *self;
        (0..self.size()).map(move |position| groups.rank(index, position))
    }

    /// The ranks of the group that holds `rank`, ascending.
    pub fn group_of(&self, rank: usize) -> impl ExactSizeIterator<Item = usize> + Clone + use<AXES> {
        self.group(self.index_of(rank))
    }

    /// All groups as lists of ranks.
    pub fn to_vecs(&self) -> Vec<Vec<usize>> {
        (0..self.count()).map(|index| self.group(index).collect()).collect()
    }

    /// The axes that were not chosen.
    fn across(&self) -> [bool; AXES] {
        self.along.map(|along| !along)
    }

    /// The product of the sizes of the axes that were chosen, or of those that were not.
    fn volume(&self, along: bool) -> usize {
        let axes = self.mesh.sizes.iter().zip(self.along);
        axes.filter(|&(_, chosen)| chosen == along).map(|(size, _)| size).product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_sizes_that_are_no_mesh() {
        let empty = Mesh::new([2, 0, 3]).unwrap_err();
        assert_eq!(empty.to_string(), "mesh axis 1 of [2, 0, 3] has size 0");
        let huge = Mesh::new([usize::MAX, 2]).unwrap_err();
        assert!(matches!(huge, TopologyError::MeshTooLarge { .. }), "{huge}");
    }

    #[test]
    fn a_mesh_without_axes_is_one_rank() {
        let groups = Mesh::new([]).unwrap().partition([]);
        assert_eq!(groups.to_vecs(), [[0]]);
    }

    #[test]
    fn all_axes_make_one_group_and_none_make_singletons() {
        let mesh = Mesh::new([2, 2]).unwrap();
        assert_eq!(mesh.partition([true, true]).to_vecs(), [[0, 1, 2, 3]]);
        assert_eq!(mesh.partition([false, false]).to_vecs(), [[0], [1], [2], [3]]);
    }
}
